"""Makes a model small enough to serve on a CPU: a Llama of two layers with random weights and a tokenizer trained here.

    .real-engines/venv/bin/python -m scripts.real_engines.make_model [--into DIR]

Runs inside the environment that `install` makes, needs no network and gives the same model each time. Its text means
nothing and often ends in half a character, which is what a relay has to survive. At temperature 0 it is deterministic,
so a text that came over a KV transfer can be compared with one that was computed in one place.
"""

import argparse
import json
from pathlib import Path

import torch  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = [
    "A narwhal surfaces where the ice is thin and breathes before it dives again.",
    "The prefill engine reads the prompt, the decode engine writes the answer.",
    "Blocks of keys and values travel from one process to the other, once.",
    "When an engine falls silent the others carry on with its work.",
]


def make_tokenizer(into: Path) -> int:
    """Writes the tokenizer's files; returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    tokenizer.save(str(into / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (into / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (into / "special_tokens_map.json").write_text(json.dumps(names, indent=1))
    return int(tokenizer.get_vocab_size())


def make_weights(into: Path, vocabulary: int) -> int:
    """Writes the weights and their configuration; returns the number of parameters.

    The weights are drawn wide (0.2) so that the most likely token has a clear lead: a narrow draw makes near-ties, and
    a near-tie may fall differently in a batch of another size.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(str(into))
    (into / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return int(sum(parameter.numel() for parameter in model.parameters()))


def main() -> None:
    default = Path(__file__).resolve().parents[2] / ".real-engines" / "model"
    parser = argparse.ArgumentParser(description="Make the tiny model that the real engines serve.")
    parser.add_argument("--into", type=Path, default=default, help="directory to write (default: .real-engines/model)")
    into: Path = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    vocabulary = make_tokenizer(into)
    parameters = make_weights(into, vocabulary)
    print(f"{into}: {vocabulary} tokens, {parameters / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()

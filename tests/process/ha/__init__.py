"""Tests of handing over: they share one ensemble, since it takes longer to start than most of them."""

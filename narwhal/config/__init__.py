"""The fleet file: read, checked as a whole, and handed out as frozen values.

`load_fleet` reads and checks a file; `FleetConfig` is what everything else is built from.
"""

from narwhal.config.fleet import FleetConfig, ProxySettings
from narwhal.config.loader import load_fleet, parse_fleet
from narwhal.config.problems import FleetFileError
from narwhal.config.schema import fleet_schema
from narwhal.config.sections import (
    AuthConfig,
    ControllerConfig,
    EngineConfig,
    EngineSettings,
    HealthConfig,
    LeaseConfig,
    ProxyConfig,
    RecoveryConfig,
    ServingConfig,
    SloConfig,
    StandbyConfig,
    StoreConfig,
    ThresholdsConfig,
    TlsConfig,
)

__all__ = [
    "AuthConfig",
    "ControllerConfig",
    "EngineConfig",
    "EngineSettings",
    "FleetConfig",
    "FleetFileError",
    "HealthConfig",
    "LeaseConfig",
    "ProxyConfig",
    "ProxySettings",
    "RecoveryConfig",
    "ServingConfig",
    "SloConfig",
    "StandbyConfig",
    "StoreConfig",
    "ThresholdsConfig",
    "TlsConfig",
    "fleet_schema",
    "load_fleet",
    "parse_fleet",
]

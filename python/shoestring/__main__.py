"""Run ``python -m shoestring``.

Without arguments it prints a report about the installation. With ``--cmake-dir`` it prints the folder that
CMake's ``find_package`` needs. With other arguments it runs the command line.
"""

import sys

import shoestring


def report() -> str:
    """Describe this installation: versions, CPU kernels, CUDA and the CMake folder, one line each."""
    import torch

    build = shoestring.build
    gpus = " ".join("PTX" if gpu == "ptx" else f"sm_{gpu}" for gpu in build.gpus)
    cuda = f"built with toolkit {build.cuda} for {gpus}" if build.cuda else f"not built ({build.cuda_note})"
    return "\n".join(
        (
            f"shoestring {build.version}, built by {build.compiler} for PyTorch {build.torch}",
            f"PyTorch    {torch.__version__}",
            f"CPU        {torch.ops.shoestring._cpu_capability()} kernels, {torch.get_num_threads()} threads",
            f"CUDA       {cuda}; this PyTorch {'sees' if torch.cuda.is_available() else 'sees no'} GPU",
            f"CMake      {shoestring.cmake_prefix_path}",
        )
    )


def main() -> int:
    """Print a report on the installation or the CMake folder, or run the command line.

    Return the exit code.
    """
    if sys.argv[1:] == ["--cmake-dir"]:
        print(shoestring.cmake_prefix_path)
    elif len(sys.argv) == 1:
        print(report())
    else:
        from shoestring.cli import main as command_line

        return command_line()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ImportError as error:  # the libraries do not fit this PyTorch
        if not str(error).startswith("shoestring"):
            raise
        sys.exit(str(error))

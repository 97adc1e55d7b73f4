// Declares the operators of csrc/files.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Writes the bytes of a CPU tensor to an open file at its current position. Returns 0 or errno. If the
  // tensor's memory is mapped from another file, its pages are dropped from memory once they are written.
  m.def("_write_tensor(int fd, Tensor x) -> int");
}

// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Writes a tensor's bytes at the position of an open file; 0 or errno. What of it is mapped from a file
  // does not stay in memory.
  m.def("write_tensor(int fd, Tensor x) -> int");
}

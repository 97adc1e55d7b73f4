// Operator schemas of offloading, and the class that offloads weights.

#include <torch/library.h>

#include "offload/activation_store.h"
#include "offload/state.h"
#include "offload/weight_store.h"

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // _store_activation moves a tensor x that autograd saves to host memory or to a disk, and
  // _reload_activation returns it for backward. Python code uses torch.classes.shoestring.ActivationStore,
  // C++ code shoestring/checkpoint/offload_activations.h.
  shoestring::offload::register_activation_store(m);
  m.def(R"(_store_activation(__torch__.torch.classes.shoestring.ActivationStore store,
      Tensor x) -> __torch__.torch.classes.shoestring.StoredActivation)");
  shoestring::offload::register_weight_store(m);
  m.def("_reload_activation(__torch__.torch.classes.shoestring.StoredActivation activation) -> Tensor");
  // Returns the blocks of 256 elements at which the chunks of offloaded optimizer state begin and end.
  // blocks: those of each parameter; bytes: of state per block; splits: whether a chunk may end within a
  // parameter.
  m.def("_chunk_edges(int bytes, int[] blocks, bool splits) -> int[]", &shoestring::offload::State::edges);
}

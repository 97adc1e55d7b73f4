// Operator schemas of activation offloading.

#include <torch/library.h>

#include "offload/activation_store.h"

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Store what autograd saves of x in host memory or on a disk, and reload it for backward. The interface for
  // Python is torch.classes.shoestring.ActivationStore, and for C++ shoestring/offload_activations.h.
  shoestring::offload::register_activation_store(m);
  m.def(R"(store_activation(__torch__.torch.classes.shoestring.ActivationStore store,
      Tensor x) -> __torch__.torch.classes.shoestring.StoredActivation)");
  m.def("reload_activation(__torch__.torch.classes.shoestring.StoredActivation activation) -> Tensor");
}

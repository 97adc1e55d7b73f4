// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

#include "offload/activation_store.h"

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // What autograd saves of x, in host memory or on a disk until it is wanted again. Python has
  // torch.classes.shoestring.ActivationStore, and C++ shoestring/offload_activations.h.
  shoestring::offload::register_activation_store(m);
  m.def(R"(store_activation(__torch__.torch.classes.shoestring.ActivationStore store,
      Tensor x) -> __torch__.torch.classes.shoestring.StoredActivation)");
  m.def("reload_activation(__torch__.torch.classes.shoestring.StoredActivation activation) -> Tensor");
}

// Makes Gloo backends, and sets their tags. No other file includes the header of ProcessGroupGloo, which
// needs Gloo's own headers. LibTorch contains Gloo, but its packages have no headers of it; Debian's
// libgloo-dev has.

#include "distributed/backends.h"

#ifdef SHOESTRING_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif

namespace shoestring::distributed {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                            std::chrono::milliseconds timeout) {
#ifdef SHOESTRING_GLOO
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      store, rank, size, c10d::ProcessGroupGloo::Options::create_default(timeout));
#else
  TORCH_CHECK(false,
              "init_process_group: backend: expected a build with Gloo, received one without: Gloo's headers "
              "(Debian: libgloo-dev) were missing when this library was built");
#endif
}

void set_gloo_tag(c10d::Backend& backend, uint32_t tag) {
#ifdef SHOESTRING_GLOO
  struct Counter : c10d::ProcessGroupGloo {
    static void set(ProcessGroupGloo& gloo, uint32_t tag) { gloo.*& Counter::collectiveCounter_ = tag; }
  };
  if (auto* gloo = dynamic_cast<c10d::ProcessGroupGloo*>(&backend)) Counter::set(*gloo, tag);
#endif
}

}  // namespace shoestring::distributed

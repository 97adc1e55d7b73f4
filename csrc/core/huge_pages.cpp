#include "core/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace shoestring {

at::Tensor in_huge_pages(at::Tensor fresh) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096, kHugePage = uintptr_t{2} << 20;
  if (fresh.is_cpu() && fresh.nbytes() >= 2 * kHugePage) {
    const auto first = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
    const uintptr_t begin = (first + kPage - 1) / kPage * kPage,
                    end = (first + fresh.nbytes()) / kPage * kPage;
    // madvise() is only a hint, so its errors are ignored.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
  return fresh;
}

}  // namespace shoestring

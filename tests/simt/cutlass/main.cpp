// Compares the emulated instructions with NVIDIA's own description of them, element by element: the layouts
// and descriptors of CuTe (part of CUTLASS), CUDA's host headers and cuRAND's header. Prints a line for each
// comparison, and how many elements it compared.

#include <cstdio>
#include <exception>

#include "compare.h"

namespace twins {
namespace {

// A loop that does not run would leave comparisons out without an error, so their number is fixed.
constexpr int kComparisons = 138;

int equal, different;

}  // namespace

void compare(const std::string& name, const std::vector<int64_t>& ours, const std::vector<int64_t>& cutes) {
  size_t i = 0;
  while (i < ours.size() && i < cutes.size() && ours[i] == cutes[i]) ++i;
  if (!ours.empty() && i == ours.size() && i == cutes.size()) {
    ++equal;
    std::printf("ok %s: %zu elements\n", name.c_str(), i);
    return;
  }
  ++different;
  if (ours.empty() || ours.size() != cutes.size()) {
    std::printf("not ok %s: expected tables of one length, received %zu elements and %zu of the reference\n",
                name.c_str(), ours.size(), cutes.size());
  } else {
    std::printf("not ok %s: element %zu of %zu is %lld, and %lld in the reference\n", name.c_str(), i,
                ours.size(), static_cast<long long>(ours[i]), static_cast<long long>(cutes[i]));
  }
}

}  // namespace twins

int main() {
  using namespace twins;
  for (const auto group : {compare_warp_matrices, compare_wgmma, compare_copies, compare_numbers}) {
    try {
      group();
    } catch (const std::exception& error) {
      std::printf("not ok the emulator refused an instruction: %s\n", error.what());
      ++different;
    }
  }
  if (equal + different != kComparisons) {
    std::printf("not ok expected %d comparisons, received %d\n", kComparisons, equal + different);
    ++different;
  }
  std::printf("%d passed, %d failed\n", equal, different);
  return different > 0 || equal == 0;
}

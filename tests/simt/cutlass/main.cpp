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

// Returns where two tables differ, or an empty text. Two empty tables differ: nothing was compared.
std::string difference(const std::vector<int64_t>& ours, const std::vector<int64_t>& cutes) {
  if (ours.empty() || ours.size() != cutes.size()) {
    return "expected tables of one length, received " + std::to_string(ours.size()) + " elements and " +
           std::to_string(cutes.size()) + " of the reference";
  }
  size_t i = 0;
  while (i < ours.size() && ours[i] == cutes[i]) ++i;
  if (i == ours.size()) return "";
  return "element " + std::to_string(i) + " of " + std::to_string(ours.size()) + " is " +
         std::to_string(ours[i]) + ", and " + std::to_string(cutes[i]) + " in the reference";
}

}  // namespace

void compare(const std::string& name, const std::vector<int64_t>& ours, const std::vector<int64_t>& cutes) {
  const std::string text = difference(ours, cutes);
  ++(text.empty() ? equal : different);
  if (text.empty()) {
    std::printf("ok %s: %zu elements\n", name.c_str(), ours.size());
  } else {
    std::printf("not ok %s: %s\n", name.c_str(), text.c_str());
  }
}

}  // namespace twins

int main() {
  using namespace twins;
  if (!difference({1, 2}, {1, 2}).empty() || difference({}, {}).empty() || difference({1}, {2}).empty() ||
      difference({1}, {1, 2}).empty()) {
    std::printf("not ok the comparison itself\n");
    ++different;
  }
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

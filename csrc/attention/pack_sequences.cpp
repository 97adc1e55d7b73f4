#include <algorithm>
#include <numeric>
#include <vector>

#include <ATen/Functions.h>
#include <torch/library.h>

#include <shoestring/attention/ops.h>

#include "core/call.h"

namespace shoestring::attend {
namespace {

using at::Tensor;

constexpr const char* kOp = "pack_sequences";

// The free space of each bin, as a binary tree of maxima. Finding the first bin with enough space takes one
// step per level of the tree.
class Bins {
 public:
  Bins(int64_t most, int64_t capacity) {
    while (leaves_ < most) leaves_ *= 2;
    room_.assign(2 * leaves_, capacity);
  }
  int64_t put(int64_t length) {
    int64_t node = 1;
    while (node < leaves_) node = room_[2 * node] >= length ? 2 * node : 2 * node + 1;
    room_[node] -= length;
    for (int64_t up = node / 2; up >= 1; up /= 2) room_[up] = std::max(room_[2 * up], room_[2 * up + 1]);
    return node - leaves_;
  }

 private:
  int64_t leaves_ = 1;
  std::vector<int64_t> room_;
};

Tensor pack(const Tensor& lengths, int64_t capacity) {
  TORCH_CHECK(lengths.dim() == 1 && lengths.scalar_type() == at::kLong && lengths.is_cpu(), kOp,
              ": lengths: expected (sequences) int64 on the CPU, received ", lengths.sizes(), " of ",
              lengths.scalar_type(), " on ", lengths.device());
  TORCH_CHECK(capacity > 0, kOp, ": capacity: expected a number of tokens above 0, received ", capacity);
  const Tensor source = lengths.contiguous();
  const int64_t count = source.numel(), *length = source.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(length[i] > 0 && length[i] <= capacity, kOp, ": lengths: expected 1 to ", capacity,
                " tokens, received ", length[i], " for sequence ", i, "; cut it, or give a larger capacity");
  }
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length[a] > length[b]; });
  Tensor bins = at::empty({count}, lengths.options());
  int64_t* to = bins.mutable_data_ptr<int64_t>();
  Bins open(std::max<int64_t>(count, 1), capacity);
  for (const int64_t i : order) to[i] = open.put(length[i]);
  return bins;
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kOp, pack); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl(kOp, [](const Tensor& lengths, int64_t) {
    return at::empty_symint(lengths.sym_sizes(), lengths.options());
  });
}

}  // namespace

}  // namespace shoestring::attend

namespace shoestring {

at::Tensor pack_sequences(const at::Tensor& lengths, int64_t capacity) {
  static auto op = find<at::Tensor(const at::Tensor&, int64_t)>("shoestring::pack_sequences");
  return op.call(lengths, capacity);
}

}  // namespace shoestring

#pragma once

#include <cstdint>

namespace shoestring::kernels {

/// The slots of groups: slot s belongs to group e if offsets[e] <= s < offsets[e + 1], and refers to row
/// rows[s] of a matrix with `count` rows, or to row s if `rows` is null. The pointers are on the device.
/// Offsets ascend; if they do not, results are undefined. Offsets count as at most `slots`. A slot outside of
/// all groups and a slot whose row is not in [0, count) have no group. Slot s has the element order[s] of
/// lists of scales and of products, or element s if `order` is null.
struct GroupedSlots {
  const int64_t* offsets;  // (groups + 1)
  const int64_t* rows;     // (slots), or null
  int64_t groups, slots, count;
  const int64_t* order = nullptr;  // (slots), or null
};

/// A matrix, or a stack of matrices, with contiguous rows. `row` and `group` are the distances of rows and of
/// the matrices of a stack, in elements.
struct GroupedMatrix {
  const void* data;
  int64_t row, group;
};

/// A product of matrices with the rows of slots. The three kinds of products, in terms of linear layers:
/// - forward: out (slots, columns): row s is x[rows[s]] W_e^T + bias_e. a = x and b = W (groups, columns,
/// depth).
/// - input: out (slots, columns): row s is grad[rows[s]] W_e + bias_e. a = grad and b = W (groups, depth,
/// columns).
/// - weight: out (groups, height, columns): the sum over the slots of a group of grad[s]^T x[rows[s]]. a =
/// grad (slots, height) and b = x. With `turned` it is the sum of grad[rows[s]]^T x[s].
/// Forward and input read row s of `a` if the slots have no rows.
/// Rows of slots without a group are 0 in out, and the weight of a group without slots is 0.
struct GroupedProduct {
  GroupedSlots slots;
  GroupedMatrix a, b;
  int64_t height = 0, columns = 0, depth = 0;
  // (groups, columns) in fp32, in fp64 if the product is computed in fp64; or null. bias_group: the distance
  // of the rows, in elements
  const void* bias = nullptr;
  int64_t bias_group = 0;
  void* out = nullptr;
  int64_t out_row = 0, out_group = 0;
  bool wide = false;    // whether out is in fp32 instead of the dtype of 16-bit operands
  bool keep = false;    // forward and input: whether rows of slots without a group keep their values
  bool turned = false;  // weight: whether the slots refer to rows of `a` instead of b
};

/// The rows whose sum is row t of a result: order[i] for starts[t] <= i < starts[t + 1], or, if `starts` is
/// null, for t each <= i < (t + 1) each; each times factors[i] if `factors`, in fp32 or fp64, is not null.
/// Rows from *end on are left out if `end` is not null. The pointers are on the device.
struct GroupedSums {
  const int64_t* order;
  const int64_t* starts = nullptr;
  int64_t each = 0;
  const void* factors = nullptr;
  const int64_t* end = nullptr;
};

/// The CUDA kernels of grouped_linear. Each function returns an error message or null.
struct GroupedLinearCuda {
  using Run = const char* (*)(const GroupedProduct&, void* stream);
  // Adds the rows of slots of each group: out (groups, columns) in fp32, or fp64, is the sum of a[s], or of
  // a[rows[s]] if `refer`, each times its element of `scale` in the dtype of out if that is not null.
  using Sum = const char* (*)(const GroupedSlots&, const GroupedMatrix& a, int64_t columns, bool refer,
                              const void* scale, void* out, void* stream);
  // Adds rows of `a` in fp32, or fp64, whose pitch is a multiple of four, to the `count` rows of out.
  using Collect = const char* (*)(const GroupedMatrix& a, const GroupedSums& sums, int64_t count,
                                  int64_t columns, void* out, int64_t out_row, void* stream);
  // Adds to the slot's element of `out` the product of a[rows[s]] and b_e (groups, columns). b and out are in
  // fp32, or fp64.
  using Dot = const char* (*)(const GroupedSlots&, const GroupedMatrix& a, const void* b, int64_t columns,
                              void* out, void* stream);
  struct Kernels {
    Run forward, input, weight;
    Sum sum;
    Collect collect;  // out has the dtype of the operands
    Dot dot;
  };
  Kernels of_float, of_double, of_bf16, of_fp16;
  // Says whether the current GPU has the tensor cores that of_bf16 and of_fp16 need.
  const char* (*has_tensor_cores)(bool& result);
};

}  // namespace shoestring::kernels

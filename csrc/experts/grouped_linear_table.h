#pragma once

#include <cstdint>

namespace shoestring::kernels {

/// The slots of groups: slot s belongs to group e if offsets[e] <= s < offsets[e + 1], and refers to row
/// rows[s] of a matrix with `count` rows, or to row s if `rows` is null. The pointers are on the device.
/// Offsets ascend; if they do not, results are undefined. Offsets count as at most `slots`. A slot outside of
/// all groups and a slot whose row is not in [0, count) have no group.
struct GroupedSlots {
  const int64_t* offsets;  // (groups + 1)
  const int64_t* rows;     // (slots), or null
  int64_t groups, slots, count;
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
/// - input: out (slots, columns): row s is grad[s] W_e. a = grad and b = W (groups, depth, columns).
/// - weight: out (groups, height, columns): the sum over the slots of a group of grad[s]^T x[rows[s]]. a =
/// grad
///   (slots, height) and b = x.
/// Rows of slots without a group are 0 in out, and the weight of a group without slots is 0.
struct GroupedProduct {
  GroupedSlots slots;
  GroupedMatrix a, b;
  int64_t height = 0, columns = 0, depth = 0;
  const void* bias =
      nullptr;  // (groups, columns) in fp32, in fp64 if the product is computed in fp64; or null
  void* out = nullptr;
  int64_t out_row = 0, out_group = 0;
  bool wide = false;  // whether out is in fp32 instead of the dtype of 16-bit operands
};

/// The CUDA kernels of grouped_linear. Each function returns an error message or null.
struct GroupedLinearCuda {
  using Run = const char* (*)(const GroupedProduct&, void* stream);
  // Adds the rows of slots of each group: a (slots, columns), out (groups, columns) in fp32, or fp64.
  using Sum = const char* (*)(const GroupedSlots&, const GroupedMatrix& a, int64_t columns, void* out,
                              void* stream);
  // Adds rows of `a` in fp32, or fp64, whose pitch is a multiple of four: row t of out, (count, columns), is
  // the sum of the rows order[i] for starts[t] <= i < starts[t + 1].
  using Collect = const char* (*)(const GroupedMatrix& a, const int64_t* order, const int64_t* starts,
                                  int64_t count, int64_t columns, void* out, int64_t out_row, void* stream);
  struct Kernels {
    Run forward, input, weight;
    Sum sum;
    Collect collect;  // out has the dtype of the operands
  };
  Kernels of_float, of_double, of_bf16, of_fp16;
  // Says whether the current GPU has the tensor cores that of_bf16 and of_fp16 need.
  const char* (*has_tensor_cores)(bool& result);
};

}  // namespace shoestring::kernels

#include "core/elementwise.h"

#include <algorithm>
#include <cstring>
#include <string>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/cuda.h"
#include "core/elementwise_operator.h"
#include "core/huge_pages.h"
#include "core/saved_view.h"
#include "core/threads.h"

namespace shoestring::elementwise {

using at::Tensor;

namespace {

constexpr size_t kMostArrays = 8;

// The addresses of arrays, as kernels take them. Results that the caller does not want are null.
template <class Void>
struct Addresses {
  Void* at[kMostArrays] = {};
  // Returns the addresses of the elements that begin `bytes` after these.
  Addresses after(size_t count, int64_t bytes) const {
    Addresses later;
    for (size_t k = 0; k < count; ++k) {
      if (at[k] != nullptr) later.at[k] = reinterpret_cast<Void*>(reinterpret_cast<uintptr_t>(at[k]) + bytes);
    }
    return later;
  }
};

template <class Run>
Run of_dtype(const Run (&runs)[3], at::ScalarType dtype) {
  return runs[dtype == at::kFloat ? 0 : dtype == at::kBFloat16 ? 1 : 2];
}

void run_kernel(const Kernels& kernels, Backend backend, bool back, at::ArrayRef<Tensor> inputs,
                at::ArrayRef<Tensor> outputs) {
  const Tensor& first = inputs[0];
  const int64_t count = first.numel(), size = first.element_size();
  Addresses<const void> in;
  Addresses<void> out;
  TORCH_INTERNAL_ASSERT(inputs.size() <= kMostArrays && outputs.size() <= kMostArrays);
  for (size_t k = 0; k < inputs.size(); ++k) in.at[k] = inputs[k].const_data_ptr();
  for (size_t k = 0; k < outputs.size(); ++k) out.at[k] = outputs[k].mutable_data_ptr();
  if (backend == Backend::kCuda) {
    if (count == 0) return;
    const c10::OptionalDeviceGuard guard(first.device());
    const auto& table = cuda::table<kernels::ElementwiseCuda>(kernels.name);
    const auto run = of_dtype(back ? table.backward : table.forward, first.scalar_type());
    return check_launch(kernels.name, run(kernels.rule, in.at, count, out.at, stream_of(first)));
  }
  const auto run = of_dtype(back ? kernels.cpu.backward : kernels.cpu.forward, first.scalar_type());
  // The formulas compute for at least as long as three arrays take to read or write, and five in backward.
  const int64_t arrays = std::max<int64_t>(back ? 5 : 3, std::ssize(inputs) + std::ssize(outputs));
  at::parallel_for(0, count, row_grain(arrays * size), [&](int64_t begin, int64_t end) {
    run(kernels.rule, in.after(inputs.size(), begin * size).at, end - begin,
        out.after(outputs.size(), begin * size).at);
  });
}

}  // namespace

void check_like(const char* op, const char* name, const Tensor& t, const char* model_name,
                const Tensor& model) {
  TORCH_CHECK(t.sym_sizes() == model.sym_sizes() && t.scalar_type() == model.scalar_type() &&
                  t.device() == model.device(),
              op, ": ", name, ": expected the shape, dtype and device of ", model_name, ", ",
              model.sym_sizes(), " of ", model.scalar_type(), " on ", model.device(), ", received ",
              t.sym_sizes(), " of ", t.scalar_type(), " on ", t.device());
}

void check_float(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK(is_supported_float(t.scalar_type()), op, ": ", name,
              ": expected fp32, fp64, bf16 or fp16, received ", t.scalar_type());
}

void check_written(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() != at::kDouble, op, ": ", name,
              ": expected a contiguous tensor of fp32, bf16 or fp16 to write over, received ",
              t.scalar_type(), " with strides ", t.strides());
}

Tensor like(const Tensor& t) { return in_huge_pages(at::empty(t.sizes(), t.options())); }

Tensor forward(const Kernels& kernels, Backend backend, std::initializer_list<Tensor> inputs) {
  Tensor out = like(*inputs.begin());
  run_kernel(kernels, backend, /*back=*/false, inputs, out);
  return out;
}

void backward(const Kernels& kernels, Backend backend, std::initializer_list<Tensor> inputs,
              at::ArrayRef<Tensor> outputs) {
  run_kernel(kernels, backend, /*back=*/true, inputs, outputs);
}

std::string backward_schema(const std::string& schema, const std::string& name, size_t count, bool in_place) {
  std::string text = name + "(Tensor grad_output", results;
  size_t begin = schema.find('(') + 1, index = 0;
  const size_t end = schema.rfind(") ->");
  for (size_t next; begin < end; begin = next + 2) {
    next = std::min(schema.find(", ", begin), end);
    std::string argument = schema.substr(begin, next - begin);
    if (argument == "*") continue;
    argument.resize(std::min(argument.find('='), argument.size()));  // removes the default
    if (index < count) {
      if (in_place)
        argument.insert(std::strlen("Tensor"), c10::str("(", static_cast<char>('a' + index), "!)"));
      results += index == 0 ? "Tensor" : ", Tensor";
    }
    ++index;
    text += ", " + argument;
  }
  return text + ") -> " + (in_place ? "()" : count == 1 ? results : "(" + results + ")");
}

bool may_overwrite(const Tensor& input) {
  return only_saved_view(input) && input.scalar_type() != at::kDouble;
}

}  // namespace shoestring::elementwise

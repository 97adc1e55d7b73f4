// Registers the class BatchSizes, with which Python searches for a batch size, and the operators of its
// advice.

#include <torch/custom_class.h>
#include <torch/library.h>

#include "runs/batch_sizes.h"

namespace shoestring::runs {
namespace {

struct BatchSizesHolder : torch::CustomClassHolder {
  BatchSizesHolder(int64_t at_most, int64_t at_least, int64_t multiple_of, std::optional<int64_t> memory)
      : sizes(FindBatchSizeOptions(at_most).at_least(at_least).multiple_of(multiple_of).memory(memory)) {}

  BatchSizes sizes;
};

using Self = c10::intrusive_ptr<BatchSizesHolder>;

// Sizes of an advice, in the order total, weights, gradients, state, parameters.
MemoryAdvice advice_of(const std::vector<int64_t>& sizes, bool has_state, std::optional<int64_t> batch_size) {
  TORCH_CHECK_VALUE(sizes.size() == 5, "_memory_advice: sizes: expected 5 numbers, received ", sizes.size());
  MemoryAdvice advice;
  advice.total = sizes[0], advice.weights = sizes[1], advice.gradients = sizes[2], advice.state = sizes[3];
  advice.parameters = sizes[4];
  advice.has_state = has_state;
  advice.batch_size = batch_size;
  return advice;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<BatchSizesHolder>("BatchSizes")
      .def(torch::init<int64_t, int64_t, int64_t, std::optional<int64_t>>())
      .def("next", [](const Self& self) { return self->sizes.next(); })
      .def("expected", [](const Self& self, int64_t rows) { return self->sizes.expected(rows); })
      .def("add", [](const Self& self, int64_t rows, bool fits, int64_t bytes,
                     bool was_run) { self->sizes.add({rows, fits, bytes, was_run}); })
      .def("best", [](const Self& self) { return self->sizes.best(); })
      .def_static("says_out_of_memory", &says_out_of_memory);
  m.def(
      "_memory_advice(int[] sizes, bool has_state, int? batch_size, int? needed, str error) -> "
      "(int state, int? activations, int? fitting)");
  m.def(
      "_memory_advice_text(int[] sizes, bool has_state, int? batch_size, int? activations, int? fitting) -> "
      "str");
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_memory_advice",
         [](const std::vector<int64_t>& sizes, bool has_state, std::optional<int64_t> batch_size,
            std::optional<int64_t> needed, const std::string& error) {
           MemoryAdvice advice = advice_of(sizes, has_state, batch_size);
           complete(advice, needed, error);
           return std::tuple(advice.state, advice.activations, advice.fitting);
         });
  m.impl("_memory_advice_text",
         [](const std::vector<int64_t>& sizes, bool has_state, std::optional<int64_t> batch_size,
            std::optional<int64_t> activations, std::optional<int64_t> fitting) {
           MemoryAdvice advice = advice_of(sizes, has_state, batch_size);
           advice.activations = activations, advice.fitting = fitting;
           return sentences(advice, /*python=*/true);
         });
}

}  // namespace shoestring::runs

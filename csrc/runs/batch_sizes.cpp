#include "runs/batch_sizes.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace shoestring::runs {
namespace {

constexpr double kGib = 1 << 30, kMib = 1 << 20;
constexpr double kSmallState = 2.03;  // bytes of 8-bit AdamW's state per parameter

void expect_size(bool good, const char* name, const std::string& expected, const std::string& received) {
  TORCH_CHECK_VALUE(good, "find_batch_size: ", name, ": expected ", expected, ", received ", received);
}

// Returns the bytes that an allocation asked for when it failed, from the message of the allocator.
int64_t asked(const std::string& message) {
  const std::string before = "Tried to allocate ";
  const size_t at = message.find(before);
  if (at == std::string::npos) return 0;
  char* end = nullptr;
  const double number = std::strtod(message.c_str() + at + before.size(), &end);
  const std::string unit(end);
  for (const auto& [name, bytes] :
       {std::pair(" bytes", 1.0), {" KiB", 1024.0}, {" MiB", kMib}, {" GiB", kGib}}) {
    if (unit.rfind(name, 0) == 0) return static_cast<int64_t>(number * bytes);
  }
  return 0;
}

std::string gib(int64_t size) {
  char text[48];
  const auto bytes = static_cast<double>(size);
  if (bytes >= kGib / 100) {
    std::snprintf(text, sizeof text, "%.2f GiB", bytes / kGib);
  } else {
    std::snprintf(text, sizeof text, "%.1f MiB", bytes / kMib);
  }
  return text;
}

}  // namespace

BatchSizes::BatchSizes(const FindBatchSizeOptions& o) : unit_(o.multiple_of()) {
  expect_size(unit_ >= 1, "multiple_of", "a number of at least 1", std::to_string(unit_));
  expect_size(o.at_least() >= 1, "at_least", "a number of at least 1", std::to_string(o.at_least()));
  smallest_ = (o.at_least() - 1) / unit_ + 1;
  most_ = o.at_most() / unit_;
  expect_size(most_ >= smallest_, "at_most", c10::str("at least ", smallest_ * unit_),
              std::to_string(o.at_most()));
  expect_size(o.memory().value_or(1) > 0, "memory", "none or a number of bytes above 0",
              std::to_string(o.memory().value_or(1)));
}

std::optional<int64_t> BatchSizes::next() const {
  const int64_t fitting = best() / unit_;
  int64_t failing = most_ + 1;
  for (const auto& trial : trials_) {
    if (!trial.fits) failing = std::min(failing, trial.batch_size / unit_);
  }
  const bool has_failed = failing <= most_;
  int64_t size = fitting == 0 ? smallest_ : std::min(2 * fitting, most_);
  if (has_failed) size = fitting == 0 ? failing : (fitting + failing) / 2;
  if (size == failing || size == fitting) return std::nullopt;
  return size * unit_;
}

int64_t BatchSizes::expected(int64_t rows) const {
  const BatchTrial *before = nullptr, *last = nullptr;
  for (const auto& trial : trials_) {
    if (trial.was_run && trial.bytes > 0) before = last, last = &trial;
  }
  if (last == nullptr) return 0;
  const auto bytes = static_cast<double>(last->bytes);
  if (before == nullptr) {
    return static_cast<int64_t>(bytes * static_cast<double>(rows) / static_cast<double>(last->batch_size));
  }
  const double slope = (bytes - static_cast<double>(before->bytes)) /
                       static_cast<double>(last->batch_size - before->batch_size);
  return static_cast<int64_t>(bytes + std::max(0.0, slope) * static_cast<double>(rows - last->batch_size));
}

int64_t BatchSizes::best() const {
  int64_t best = 0;
  for (const auto& trial : trials_) {
    if (trial.fits) best = std::max(best, trial.batch_size);
  }
  return best;
}

bool says_out_of_memory(const std::string& message) {
  for (const char* text : {"out of memory", "can't allocate memory", "not enough memory"}) {
    if (message.find(text) != std::string::npos) return true;
  }
  return false;
}

void complete(MemoryAdvice& a, std::optional<int64_t> needed, const std::string& error) {
  if (!a.has_state) a.state = static_cast<int64_t>(kSmallState * static_cast<double>(a.parameters));
  const int64_t room = a.total - (a.weights + a.gradients + a.state);
  if (needed) a.activations = std::max<int64_t>(0, *needed + asked(error) - (a.total - room));
  if (a.activations.value_or(0) == 0 || !a.batch_size || room <= 0) return;
  const double rows =
      static_cast<double>(room) * static_cast<double>(*a.batch_size) / static_cast<double>(*a.activations);
  const int64_t fitting = std::min(static_cast<int64_t>(std::min(rows, 1e18)), *a.batch_size - 1);
  if (fitting > 0) a.fitting = fitting;
}

std::string sentences(const MemoryAdvice& a, bool python) {
  const int64_t room = a.total - (a.weights + a.gradients + a.state);
  std::string text = c10::str("The device has ", gib(a.total), ". A step holds weights ", gib(a.weights),
                              ", gradients ", gib(a.gradients), ", optimizer state ", gib(a.state),
                              a.has_state ? "" : " (as AdamW in 8 bits would have)");
  if (a.activations) {
    text += c10::str(", and needed at least ", gib(*a.activations), " of activations");
    if (a.batch_size) text += c10::str(" for ", *a.batch_size, " rows");
  }
  if (a.fitting) {
    text +=
        c10::str(". A micro-batch of ", *a.fitting, " rows would have fitted; accumulate() adds up several");
  }
  if (a.activations && room > 0 && room < *a.activations) {
    text += python ? c10::str(". So would checkpoint_model(model, memory_budget=", room, ")")
                   : c10::str(". So would plan_sequential() with a budget of ", room, " bytes");
  }
  const auto small = static_cast<int64_t>(kSmallState * static_cast<double>(a.parameters));
  if (a.has_state && static_cast<double>(a.state) > 1.5 * static_cast<double>(small)) {
    text += c10::str(". An optimizer of shoestring",
                     python ? "." : "::", "optim with 8-bit state would save ", gib(a.state - small));
  }
  if (a.has_state && a.state > 0) {
    text += c10::str(". ", python ? "offload=\"cpu\"" : "set_offload(\"cpu\")", " would take ", gib(a.state),
                     " of state off the device");
  }
  if (room <= 0 && a.weights > a.total / 4) {
    text += c10::str(". ", python ? "offload_weights(model)" : "OffloadWeights",
                     " keeps all blocks but two elsewhere, and adapters need no gradients of weights");
  }
  return text + ".";
}

}  // namespace shoestring::runs

#pragma once

// The decisions of the search for a batch size, in both languages. The caller runs the trials.

#include <shoestring/runs/find_batch_size.h>

namespace shoestring::runs {

class BatchSizes {
 public:
  /// Raises c10::ValueError if an option is out of range.
  explicit BatchSizes(const FindBatchSizeOptions& options);

  /// Returns the number of rows to try next; nothing if the search is done.
  std::optional<int64_t> next() const;
  /// Returns the bytes that so many rows take, from the line through the last two trials; 0 before a trial.
  int64_t expected(int64_t rows) const;
  void add(const BatchTrial& trial) { trials_.push_back(trial); }
  /// Returns the largest number of rows that fits, 0 if none does.
  int64_t best() const;
  const std::vector<BatchTrial>& trials() const { return trials_; }

 private:
  int64_t unit_, smallest_, most_;  // unit_ in rows, the others in units
  std::vector<BatchTrial> trials_;
};

/// Returns whether the message of an error says that memory could not be allocated.
bool says_out_of_memory(const std::string& message);

/// Fills in what the sizes of an advice give: activations and fitting. `needed` is what the step took.
void complete(MemoryAdvice& advice, std::optional<int64_t> needed, const std::string& error);

/// Returns the advice in sentences, with the names of one language.
std::string sentences(const MemoryAdvice& advice, bool python);

}  // namespace shoestring::runs

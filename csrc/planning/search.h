#pragma once

// Searches for the fastest plan of a situation.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <shoestring/planning/plan_training.h>

namespace shoestring::planning {

using Levers = std::map<std::string, std::string>;

/// A candidate has what the search chooses outside of the blocks: indices of TrainingForm, OptimizerWay and
/// WeightsPlace.
struct Candidate {
  size_t form, optimizer, place;
  int64_t micro_batch;
};

/// A candidate with the treatment of its blocks.
struct Found {
  Candidate candidate;
  CheckpointPlan plan;
  std::vector<PlanPhase> phases;
  int64_t peak = 0, host = 0, disk = 0;
  double seconds = 0;
};

/// The least value of each budget with which a plan exists, if the other budgets are as they are.
struct LeastBudgets {
  std::optional<int64_t> device, host, disk;
};

class Search {
 public:
  /// Raises ValueError if a value of the situation is wrong.
  explicit Search(const Situation& situation);

  /// Returns the fastest plan within the budgets; none if there is none. Of equally fast plans, it is the one
  /// with the fewest choices that differ from plain training.
  std::optional<Found> fastest(const std::string& freedom, const Levers& fixed);

  /// Returns the choices of a candidate and of its blocks by their names.
  Levers levers(const Found& found) const;

  /// Returns the treatment of each block, from what runs before the blocks of the model to what runs after
  /// them.
  std::vector<PlanChoice> choices(const Found& found) const;

  /// Returns for each of these blocks the bytes of blocks so far that may still wait for their copy to the
  /// host. With them, the peak stays within the budget, and at most 5 % above that of the plan.
  std::vector<int64_t> pending_bytes(const Found& found) const;

  /// Returns the fastest plans of one form for all budgets of device memory, from the smallest peak to the
  /// least time.
  std::vector<Found> frontier(const std::string& freedom, const Levers& fixed, size_t form);

  /// Returns a time that no plan goes below.
  double least_seconds(const std::string& freedom, const Levers& fixed);

  LeastBudgets least_budgets(const std::string& freedom, const Levers& fixed);

  /// Raises ValueError if a fixed choice has no name of a choice, or a value that no candidate has.
  void check_fixed(const Levers& fixed) const;

  const Situation& situation() const { return situation_; }

  /// Returns whether blocks may copy activations to the host, whose memory is then another one than the
  /// device's.
  bool copies() const { return !situation_.host_is_device && situation_.out_bytes_per_second > 0; }

 private:
  using Key = std::tuple<size_t, int64_t, bool, std::string, size_t>;

  std::vector<Candidate> candidates(const std::string& freedom, const Levers& fixed) const;
  const std::vector<CheckpointPlan>& treatments(const Candidate& c, const std::string& activations,
                                                size_t copying);
  std::optional<Found> fitting(const Candidate& c, const Levers& fixed, size_t copying);
  size_t copying(const Candidate& c) const;
  std::vector<int64_t> copied_bytes(const Candidate& c) const;
  int64_t room_for_copies(const Found& found) const;
  CheckpointPlanOptions link() const;
  std::vector<PlanBlock> blocks_of(size_t form, int64_t rows, bool kept) const;
  Found found(const Candidate& c, const CheckpointPlan& plan) const;
  double least_seconds(const Candidate& c);
  bool keeps_gradients(const Candidate& c) const;
  double seconds_of_batch(const Candidate& c, double pass) const;
  int64_t accumulate(const Candidate& c) const { return situation_.batch_size / c.micro_batch; }
  const TrainingForm& form(const Candidate& c) const { return situation_.forms[c.form]; }
  const OptimizerWay& optimizer(const Candidate& c) const { return form(c).optimizers[c.optimizer]; }
  const WeightsPlace& place(const Candidate& c) const { return form(c).places[c.place]; }

  const Situation& situation_;
  std::vector<int64_t> micro_batches_;  // the divisors of the batch
  std::map<Key, std::vector<CheckpointPlan>> treatments_;
  std::map<std::tuple<size_t, int64_t, bool>, double> least_seconds_;
};

/// Returns the choices of plain training: nothing is recomputed, rounded or moved.
const Levers& plain_levers();

/// Returns tiles as TrainingPlan::levers() has them.
std::string tiles_text(const std::map<std::string, int64_t>& tiles);

/// Returns whether a freedom allows what needs `needed`.
bool allows(const std::string& freedom, const std::string& needed);

/// Returns the choices of a candidate by their names, but for those of its blocks.
Levers outer_levers(const TrainingForm& form, const OptimizerWay& optimizer, const WeightsPlace& place,
                    int64_t micro_batch);

}  // namespace shoestring::planning

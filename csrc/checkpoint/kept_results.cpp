// Keeps results for the second run of checkpointed functions, whatever the options of the checkpoint.

#include "checkpoint/kept_results.h"

#include <shoestring/checkpoint/checkpoint.h>

#include <algorithm>

#include "checkpoint/operator_tape.h"

namespace shoestring::activations {
namespace {

using Results = std::vector<at::Tensor>;

struct Open {
  KeptResults* kept;
  bool is_second;
  size_t next = 0;  // the number of calls that a second run has seen
};

// The runs of checkpointed functions on this thread, the innermost last.
thread_local std::vector<Open> open_runs;

// Copies results, so that the function may modify its own. Tapes do not see the copies, since the two runs
// make different numbers of them.
Results copies(const Results& results) {
  const NoTape unseen;
  Results all;
  for (const at::Tensor& result : results) all.push_back(result.clone());
  return all;
}

// Returns the results for the innermost of the `depth` outer runs.
Results results_in(size_t depth, const std::function<Results()>& compute) {
  if (depth == 0) return compute();
  if (Open& run = open_runs[depth - 1]; run.is_second) {
    const size_t call = run.next++;
    return call < run.kept->size() ? copies((*run.kept)[call]) : compute();
  }
  Results results = results_in(depth - 1, compute);
  open_runs[depth - 1].kept->push_back(copies(results));
  return results;
}

}  // namespace

KeptResultsRun::KeptResultsRun(KeptResults& kept, bool is_second) { open_runs.push_back({&kept, is_second}); }

KeptResultsRun::~KeptResultsRun() { open_runs.pop_back(); }

Results kept_results(const std::function<Results()>& compute) {
  return results_in(open_runs.size(), compute);
}

}  // namespace shoestring::activations

namespace shoestring {

bool is_recomputing() {
  return std::ranges::any_of(activations::open_runs, [](const auto& run) { return run.is_second; });
}

}  // namespace shoestring

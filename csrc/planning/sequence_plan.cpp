#include <shoestring/planning/sequence_plan.h>

#include <c10/util/Exception.h>

#include "planning/check.h"

namespace shoestring {

SequencePlan sequence_plan(const TrainingPlan& plan, const std::vector<std::string>& blocks, int64_t before,
                           int64_t after) {
  TORCH_CHECK_VALUE(before >= 0 && after >= 0,
                    "sequence_plan: before and after: expected numbers of functions, received ", before,
                    " and ", after);
  const auto& planned = plan.checkpoints;
  TORCH_CHECK_VALUE(planned.size() == blocks.size(), "sequence_plan: blocks: expected the ", planned.size(),
                    " planned ones, received ", blocks.size(), "; plan anew for this model");
  SequencePlan found;
  found.names.assign(before, "keep");
  // A function begins when no more bytes wait for their copy than the plan says for the end of the last
  // block.
  found.pending_bytes.assign(before + 1, 0);
  for (size_t i = 0; i < blocks.size(); ++i) {
    TORCH_CHECK_VALUE(planned[i].block == blocks[i], "sequence_plan: blocks: expected ",
                      planning::shown(planned[i].block), " as block ", i, ", received ",
                      planning::shown(blocks[i]), "; plan anew for this model");
    found.names.push_back(planned[i].treatment);
    found.pending_bytes.push_back(planned[i].pending_bytes);
  }
  found.names.resize(found.names.size() + after, "keep");
  found.pending_bytes.resize(found.names.size(), planned.empty() ? 0 : planned.back().pending_bytes);
  return found;
}

}  // namespace shoestring

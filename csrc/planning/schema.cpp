// Registers the operators of the planner for Python, which exchange JSON.

#include <string>

#include <shoestring/planning/plan_training.h>
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Plans the training of a situation, which is JSON as the plan is. `fixed` holds the names and the values
  // of choices that are given. shoestring/planning/plan_training.h describes all of them.
  m.def("_plan_training(str situation, str freedom, Dict(str, str) fixed) -> str",
        [](const std::string& situation, const std::string& freedom,
           const c10::Dict<std::string, std::string>& fixed) {
          shoestring::PlanOptions::Fixed choices;
          for (const auto& entry : fixed) choices[entry.key()] = entry.value();
          return shoestring::plan_training(shoestring::Situation::from_json(situation),
                                           shoestring::PlanOptions().freedom(freedom).fixed(choices))
              .to_json();
        });
  // Checks a plan and returns it with its fields in their order. _load_plan reads it from a file.
  m.def("_check_plan(str plan) -> str",
        [](const std::string& plan) { return shoestring::TrainingPlan::from_json(plan).to_json(); });
  m.def("_load_plan(str path) -> str",
        [](const std::string& path) { return shoestring::TrainingPlan::load(path).to_json(); });
  m.def("_save_plan(str plan, str path) -> ()", [](const std::string& plan, const std::string& path) {
    shoestring::TrainingPlan::from_json(plan).save(path);
  });
}

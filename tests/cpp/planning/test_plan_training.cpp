#include "catch.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <shoestring/planning/plan_training.h>

#include "folder.h"

using namespace shoestring;
using Catch::Contains;

namespace {

PlanBlock block(int64_t rows, std::vector<PlanChoice> choices) {
  for (PlanChoice& choice : choices) {
    choice.bytes *= rows, choice.extra_seconds *= static_cast<double>(rows);
    choice.forward_bytes = choice.backward_bytes = 100 * rows;
  }
  return {1.0 * static_cast<double>(rows), 2.0 * static_cast<double>(rows), choices};
}

/// Two blocks that hold 100 bytes a row if they keep their activations, 1000 bytes of weights, and 40 or 160
/// bytes of state. Both precisions have the same memory, but bf16 takes half the time.
Situation situation() {
  Situation found;
  found.model = "model", found.machine = "machine", found.blocks = {"layers.0", "layers.1"};
  found.batch_size = 4, found.reserve_bytes = 500;
  for (const double speed : {1.0, 0.5}) {
    TrainingForm form;
    form.precision = speed == 1 ? "fp32" : "bf16", form.freedom = speed == 1 ? "exact" : "rounding";
    form.gradient_bytes = 90, form.kinds = {0, 1, 1, 0};
    for (const int64_t rows : {1, 4}) {
      MeasuredPass pass{rows, {}, {}};
      pass.freed = {block(rows, {{"keep", 0, 0}}), block(rows, {{"keep", 100, 0}, {"recompute", 10, 1}})};
      for (PlanBlock& one : pass.freed) {
        one.forward_seconds *= speed, one.backward_seconds *= speed;
        for (PlanChoice& choice : one.choices) choice.extra_seconds *= speed;
      }
      pass.kept = pass.freed;
      pass.kept[1].gradient_bytes = 45;
      form.passes.push_back(pass);
    }
    OptimizerWay whole;
    whole.device_bytes = 40, whole.seconds = 0.25;
    form.optimizers = {whole};
    form.places = {{"none", 0, 1000, 0, 0, 0, {}}};
    found.forms.push_back(form);
  }
  return found;
}

}  // namespace

TEST_CASE("A plan without a budget switches nothing on", "[plan_training]") {
  const TrainingPlan plan = plan_training(situation());
  CHECK(plan.micro_batch == 4);
  CHECK(plan.accumulate == 1);
  CHECK(plan.precision == "fp32");
  CHECK(plan.seconds == Approx(4 * 12 + 0.25));
  CHECK(plan.least_seconds == plan.seconds);
  // the process, weights, state, activations of both blocks, and what runs after them
  CHECK(plan.peak_bytes == 500 + 1000 + 40 + 800 + 400);
  for (const BlockPlan& one : plan.checkpoints) CHECK(one.treatment == "keep");
  REQUIRE(plan.reasons.size() == 1);
  CHECK_THAT(plan.reasons[0].text, Contains("nothing is switched on"));
  REQUIRE(plan.alternatives.size() == 1);
  CHECK(plan.alternatives[0].levers.at("precision") == "bf16");
}

TEST_CASE("A budget is kept, and more freedom is faster", "[plan_training]") {
  Situation given = situation();
  double slowest = 1e9;
  for (int64_t budget = plan_training(given).frontier.front().peak_bytes; budget < 3000; budget += 50) {
    given.device_memory = budget;
    const TrainingPlan plan = plan_training(given);
    CHECK(plan.peak_bytes <= budget);
    CHECK(plan.seconds <= slowest);
    CHECK(plan.micro_batch * plan.accumulate == 4);
    CHECK(plan_training(given, PlanOptions().freedom("rounding")).seconds < plan.seconds);
    slowest = plan.seconds;
  }
  const auto fixed = PlanOptions().fixed({{"micro_batch", "2"}, {"activations", "recompute"}});
  const TrainingPlan plan = plan_training(given, fixed);
  CHECK(plan.levers().at("micro_batch") == "2");
  CHECK(plan.levers().at("activations") == "recompute");
  CHECK_THAT(plan.reasons[0].text, Contains("as given"));
}

TEST_CASE("Activations are copied to the host if it has room and the link is fast", "[plan_training]") {
  Situation given = situation();
  given.host_is_device = false, given.out_bytes_per_second = given.in_bytes_per_second = 1e6;
  for (TrainingForm& form : given.forms) {
    for (MeasuredPass& pass : form.passes) {
      for (auto* kinds : {&pass.freed, &pass.kept}) {
        PlanChoice copied = (*kinds)[1].choices[0];
        copied.name = "offload", copied.link_bytes = copied.bytes, copied.bytes = 0;
        (*kinds)[1].choices.push_back(copied);
      }
    }
  }
  const auto whole = PlanOptions().fixed({{"micro_batch", "4"}});
  const int64_t kept = plan_training(given, whole).peak_bytes;
  given.device_memory = kept - 1;
  const TrainingPlan plan = plan_training(given, whole);
  CHECK(plan.checkpoints[0].treatment == "offload");
  CHECK(plan.checkpoints[0].link_bytes == 400);
  CHECK(plan.host_bytes == 400 + plan.checkpoints[1].link_bytes);
  CHECK(plan.peak_bytes < kept);
  CHECK(plan.seconds == Approx(4 * 12 + 0.25).epsilon(1e-4));
  CHECK(plan.least_seconds <= plan.seconds);
  given.host_memory = 400;
  CHECK(plan_training(given, whole).host_bytes == 400);
  given.host_memory = 399;
  const TrainingPlan without = plan_training(given, whole);
  CHECK(without.host_bytes == 0);
  CHECK(without.seconds > plan.seconds + 3);
  given.host_memory.reset(), given.host_is_device = true;
  CHECK(plan_training(given, whole).seconds == without.seconds);
}

TEST_CASE("Layers are in tiles only if whole ones do not fit", "[plan_training]") {
  Situation given = situation();
  for (TrainingForm& form : given.forms) {
    form.places = {{"nvme:D", 0, 700, 0, 1000, 40, {}},
                   {"nvme:D", 0, 300, 0, 1000, 60, {{"head", 64}, {"up", 32}}}};
  }
  const TrainingPlan whole = plan_training(given);
  CHECK(whole.tiles.empty());
  CHECK(whole.levers().at("tiles") == "none");
  given.device_memory =
      plan_training(given, PlanOptions().fixed({{"tiles", "none"}})).frontier[0].peak_bytes - 1;
  const TrainingPlan tiled = plan_training(given);
  CHECK(tiled.tiles == std::map<std::string, int64_t>{{"head", 64}, {"up", 32}});
  CHECK(tiled.levers().at("tiles") == "head=64,up=32");
  CHECK(tiled.peak_bytes <= *given.device_memory);
  const auto reason = std::find_if(tiled.reasons.begin(), tiled.reasons.end(),
                                   [](const PlanReason& one) { return one.lever == "tiles"; });
  REQUIRE(reason != tiled.reasons.end());
  CHECK_THAT(reason->text,
             Contains("head in tiles of 64 rows, up in tiles of 32 rows: without it, no plan fits"));
  CHECK_THROWS_WITH(plan_training(given, PlanOptions().fixed({{"tiles", "none"}})),
                    Contains("expected device_memory of at least"));
  CHECK_THROWS_WITH(plan_training(given, PlanOptions().fixed({{"tiles", "up=1"}})),
                    Contains("fixed: tiles: expected head=64,up=32 | none, received up=1"));
  CHECK(Situation::from_json(given.to_json()).forms[0].places[1].tiles == tiled.tiles);
  CHECK(TrainingPlan::from_json(tiled.to_json()).tiles == tiled.tiles);
  TrainingPlan wrong = tiled;
  wrong.tiles["head"] = 0;
  CHECK_THROWS_WITH(TrainingPlan::from_json(wrong.to_json()),
                    Contains(".tiles.head: expected 1 to 2^52 rows of a tile, received 0"));
  wrong.tiles = {{"", 5}};
  CHECK_THROWS_WITH(TrainingPlan::from_json(wrong.to_json()),
                    Contains(".tiles: expected names of layers, received an empty one"));
  given.forms[1].places[1].tiles["up"] = -3;
  CHECK_THROWS_WITH(plan_training(given), Contains("forms[1].places[1].tiles.up: expected 1 to 2^52 rows"));
}

TEST_CASE("Plans and situations are the same after JSON", "[plan_training]") {
  const Situation given = situation();
  CHECK(Situation::from_json(given.to_json()).to_json() == given.to_json());
  const TrainingPlan plan = plan_training(given);
  CHECK(TrainingPlan::from_json(plan.to_json()).to_json() == plan.to_json());
  const Folder folder;
  plan.save(folder / "plan.json");
  CHECK(TrainingPlan::load(folder / "plan.json").to_json() == plan.to_json());
}

TEST_CASE("Wrong situations and plans are refused by name", "[plan_training]") {
  Situation given = situation();
  given.device_memory = 100;
  CHECK_THROWS_WITH(plan_training(given), Contains("plan_training: expected device_memory of at least"));
  given = situation();
  given.batch_size = 0;
  CHECK_THROWS_WITH(plan_training(given), Contains("batch_size: expected 1 to 1048576, received 0"));
  given = situation();
  given.forms[0].passes[1].freed[1].choices[0].bytes = -1;
  CHECK_THROWS_WITH(
      plan_training(given),
      Contains("forms[0].passes[1].freed[1].choices[0].bytes: expected 0 to 2^52, received -1"));
  given = situation();
  given.forms[1].optimizers[0].seconds = std::nan("");
  CHECK_THROWS_WITH(plan_training(given),
                    Contains("forms[1].optimizers[0].seconds: expected a finite number"));
  given = situation();
  CHECK_THROWS_WITH(plan_training(given, PlanOptions().freedom("all")), Contains("received all"));
  CHECK_THROWS_WITH(plan_training(given, PlanOptions().fixed({{"precision", "fp8"}})),
                    Contains("precision: expected bf16 | fp32, received fp8"));
  TrainingPlan plan = plan_training(given);
  plan.checkpoints[1].treatment = "forget";
  CHECK_THROWS_WITH(TrainingPlan::from_json(plan.to_json()),
                    Contains("checkpoints[1].treatment: expected keep | ") && Contains("received forget"));
  plan = plan_training(given);
  plan.accumulate = 0;
  CHECK_THROWS_WITH(TrainingPlan::from_json(plan.to_json()), Contains("accumulate: expected at least 1"));
  plan = plan_training(given);
  plan.micro_batch = plan.accumulate = int64_t{1} << 40;
  CHECK_THROWS_WITH(TrainingPlan::from_json(plan.to_json()),
                    Contains("accumulate: expected at most 1048576 rows in a batch"));
  CHECK_THROWS_WITH(TrainingPlan::load("no/such/plan.json"), Contains("no/such/plan.json: cannot open"));
}

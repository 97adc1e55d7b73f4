// Tests resuming optimizers from archives and files. A resumed optimizer continues bit for bit. If the state
// does not fit the parameters, nothing of it is loaded.

#include "catch.h"

#include <torch/optim/adamw.h>
#include <torch/optim/serialize.h>

#include <shoestring/files/safetensors.h>

#include "folder.h"
#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

// Splits parameters into two groups, each with one that is smaller than min_quantize_size. p[1] gets its
// first gradient only after the state was loaded.
Groups groups_of(const std::vector<Tensor>& p) { return {{{p[2], p[0]}}, {{p[1], p[3]}}}; }

void train_but(LowMemoryOptimizer& opt, const std::vector<Tensor>& params, int from, int to, bool all) {
  for (int step = from; step < to; ++step) {
    new_gradients(params, step);
    if (!all) params[1].mutable_grad() = Tensor();
    opt.step();
  }
}

}  // namespace

TEST_CASE("every optimizer resumes bit for bit, from an archive and from a file", "[optim]") {
  const Folder folder;
  const std::string path = folder / "optimizer.safetensors";
  for (const RuleCase& rule : rule_cases()) {
    for (const std::string state : kStates) {
      for (const std::string weights : kRoundings) {
        for (auto dtype : {at::kFloat, at::kBFloat16}) {
          for (bool file : {false, true}) {
            CAPTURE(rule.name, state, weights, dtype, file);
            const auto make = rule.name == "SGD" ? parameters : matrices;
            const auto through = make(dtype), resumed = make(dtype);
            const auto opt = rule.make(groups_of(through), state, weights);
            train_but(*opt, through, 0, 3, false);
            copy(through, resumed);
            // This optimizer has default options; loading the archive or file must replace them.
            const auto other = rule.with_defaults(groups_of(resumed));
            if (file) {
              save_optimizer(*opt, path);
              load_optimizer(*other, path);
            } else {
              load_archive(*other, archived(*opt));
            }
            CHECK(other->state().size() == opt->state().size());
            train_but(*opt, through, 3, 6, true);
            train_but(*other, resumed, 3, 6, true);
            CHECK(equal(through, resumed));
            for (const Tensor& p : through) {
              const Tensor& q = resumed[static_cast<size_t>(&p - through.data())];
              for (const auto& [name, tensor] : state_of(*opt, p).tensors()) {
                CAPTURE(name);
                CHECK(at::equal(tensor, state_of(*other, q)[name]));
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("groups keep their own options, in place", "[optim]") {
  const Folder folder;
  const auto params = parameters();
  Groups groups;
  groups.emplace_back(std::vector<Tensor>{params[1]});
  groups.emplace_back(
      std::vector<Tensor>{params[2]},
      std::make_unique<LionOptions>(
          LionOptions(0.5).betas({0.5, 0.25}).state_format("fp32").min_quantize_size(7).seed(-3)));
  Lion opt(groups), other(groups);
  save_optimizer(opt, folder / "a.safetensors");
  auto& options = static_cast<LionOptions&>(other.param_groups()[1].options());
  options = LionOptions();
  load_optimizer(other, folder / "a.safetensors");
  CHECK(options.lr() == 0.5);
  CHECK(options.betas() == std::make_tuple(0.5, 0.25));
  CHECK(options.state_format() == "fp32");
  CHECK(options.min_quantize_size() == 7);
  CHECK(options.seed() == -3);
  options = LionOptions();
  load_archive(other, archived(opt));
  CHECK(options.lr() == 0.5);
  CHECK(options.seed() == -3);
}

TEST_CASE("an archive that does not name its optimizer is refused", "[optim]") {
  torch::serialize::OutputArchive out;
  out.write("format_version", c10::IValue(int64_t{1}));
  std::stringstream file;
  out.save_to(file);
  AdamW opt(parameters());
  CHECK_THROWS_WITH(load_archive(opt, file.str()), Contains("format_version 1, received another one"));
}

TEST_CASE("what does not fit is refused, and nothing changes", "[optim]") {
  const Folder folder;
  const std::string path = folder / "adamw.safetensors", bad = folder / "bad.safetensors";
  const auto params = parameters();
  AdamW opt(groups_of(params), AdamWOptions(0.25));
  train(opt, params, 0, 1);
  save_optimizer(opt, path);
  const std::string archive = archived(opt);

  const auto refused = [&](auto& other, const std::string& file, const std::string& expected) {
    const std::string before = archived(other);
    CHECK_THROWS_WITH(load_optimizer(other, file), Contains(expected));
    CHECK(archived(other).size() == before.size());
    CHECK(other.param_groups()[0].options().get_lr() != 0.25);
  };
  // The state tensors of Lion and AdamW have some names in common. Only the optimizer's name in the file
  // prevents loading one as the other.
  Lion lion(groups_of(params));
  const std::string where = "Lion: load_optimizer: " + path;
  refused(lion, path, where + ": expected optimizer Lion, received AdamW");
  CHECK_THROWS_WITH(
      load_archive(lion, archive),
      Contains("Lion: load: expected an archive of this optimizer, format_version 1, received AdamW's"));
  AdamW fewer(params);
  refused(fewer, path, "expected 1 groups of parameters, received 2");
  CHECK_THROWS_WITH(load_archive(fewer, archive),
                    Contains("load: expected 1 groups of parameters, received 2"));
  AdamW longer({{{params[2]}}, {{params[1], params[3], params[0]}}});
  refused(longer, path, "expected 1 parameters in group 0, received 2");
  CHECK_THROWS_WITH(load_archive(longer, archive), Contains("expected 1 parameters in group 0, received 2"));

  const Tensor wide = at::zeros({7}).requires_grad_();
  AdamW wider({{{params[2], wide}}, {{params[1], params[3]}}});
  const std::string shape = "AdamW: exp_avg: expected Byte [7] for a parameter of [7], received Byte [1]";
  refused(wider, path, shape);
  CHECK_THROWS_WITH(load_archive(wider, archive), Contains(shape));
  CHECK(wider.state().empty());

  shoestring::TensorDict tensors;
  const shoestring::SafetensorsFile file(path);
  for (const auto& entry : file.entries()) tensors.insert(entry.name, file.load(entry.name));
  const auto with = [&](const std::string& key, const std::string& value) {
    auto metadata = file.metadata();
    metadata[key] = value;
    shoestring::save_safetensors(bad, tensors, metadata);
  };
  AdamW same(groups_of(params));
  with("format_version", "2");
  refused(same, bad, "expected format_version 1, received 2");
  with("format", "pt");
  refused(same, bad, "expected format shoestring.optimizer, received pt");
  std::string groups = file.metadata().at("groups");
  with("groups", groups.substr(1));
  refused(same, bad, "groups: not valid JSON");
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = groups;
    with("groups", text.replace(text.find(from), from.size(), to));
  };
  edited("\"eps\":", "\"epsilon\":");
  refused(same, bad, "key 'eps' not found");
  edited("\"eps\":1e-08", "\"eps\":1e-08,\"amsgrad\":true");
  refused(same, bad, "expected this optimizer's options alone, received {\"amsgrad\":true}");
  edited("\"eps\":1e-08", "\"eps\":-1");
  refused(same, bad, "AdamW: eps: expected a number of at least 0, received -1");
  edited("\"state_format\":\"8bit\"", "\"state_format\":\"fp32\"");
  refused(same, bad,
          "state_format=\"fp32\": expected the entries exp_avg, exp_avg_sq, step, received exp_avg, "
          "exp_avg_scale");
  for (const char* name : {"0.9.step", "2.0.step", "00.1.step", "step", "0.-1.step"}) {
    tensors.insert(name, at::zeros({}));
    with("format_version", "1");
    refused(same, bad,
            std::string("expected tensors called <group>.<index>.<name>, of the file's groups, received ") +
                name);
    tensors.erase(name);
  }

  torch::serialize::OutputArchive out;
  std::stringstream stream;
  out.write("something", at::zeros({1}));
  out.save_to(stream);
  CHECK_THROWS_WITH(load_archive(same, stream.str()), Contains("expected an archive of this optimizer"));
}

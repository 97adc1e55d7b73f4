#include "catch.h"

#include <cmath>

#include <ATen/ATen.h>

#include <shoestring/files/average_checkpoints.h>
#include <shoestring/files/safetensors.h>

#include "folder.h"

using at::Tensor;
using shoestring::average_checkpoints;
using shoestring::TensorDict;

namespace {

TensorDict checkpoint(int64_t step) {
  TensorDict tensors;
  tensors.insert("a", at::randn({3, 70001}));
  tensors.insert("b", at::randn({5}).to(at::kBFloat16));
  tensors.insert("c", at::randn({5}, at::kDouble));
  tensors.insert("n", at::arange(4));
  return tensors;
}

}  // namespace

TEST_CASE("average_checkpoints averages floating-point tensors and copies the others", "[files]") {
  at::manual_seed(0);
  const Folder folder;
  const std::vector<TensorDict> inputs = {checkpoint(0), checkpoint(1), checkpoint(2)};
  std::vector<std::string> paths;
  for (size_t i = 0; i < inputs.size(); ++i) {
    paths.push_back(folder / (std::to_string(i) + ".safetensors"));
    shoestring::save_safetensors(paths.back(), inputs[i], {{"format", "pt"}});
  }
  const std::vector<double> weights = {0.5, 0.75, -0.25};
  average_checkpoints(paths, folder / "out.safetensors", weights);
  const shoestring::SafetensorsFile file(folder / "out.safetensors");
  CHECK(file.metadata().at("format") == "pt");
  for (const auto& item : inputs[0]) {
    const Tensor found = file.load(item.key());
    CHECK(found.scalar_type() == item.value().scalar_type());
    if (item.key() == "n") {
      CHECK(at::equal(found, item.value()));
      continue;
    }
    Tensor exact = at::zeros(found.sizes(), at::kDouble), size = at::zeros(found.sizes(), at::kDouble);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor t = inputs[i][item.key()].to(at::kDouble);
      exact += t * weights[i];
      size += t.abs() * std::abs(weights[i]);
    }
    // Each of three products, sums and factors is rounded, and then the result once.
    const double unit = item.key() == "c" ? std::exp2(-53) : std::exp2(-24);
    const double rounding = item.key() == "a" ? std::exp2(-24) : item.key() == "b" ? std::exp2(-8) : 0;
    CHECK(((found.to(at::kDouble) - exact).abs() <= size * (9 * unit) + exact.abs() * rounding)
              .all()
              .item<bool>());
  }
}

TEST_CASE("average_checkpoints writes nothing if checkpoints differ", "[files]") {
  at::manual_seed(0);
  const Folder folder;
  const std::string a = folder / "a.safetensors", b = folder / "b.safetensors",
                    out = folder / "out.safetensors";
  shoestring::save_safetensors(a, checkpoint(0));
  TensorDict other = checkpoint(1);
  other["n"] = at::arange(1, 5);
  shoestring::save_safetensors(b, other);
  CHECK_THROWS_WITH(
      average_checkpoints({a, b}, out),
      Catch::Contains("average_checkpoints: " + b +
                      ": tensor \"n\": expected the values of the first checkpoint, because Long "
                      "cannot be averaged, received others"));
  CHECK_THROWS_AS(average_checkpoints({a, a}, out, std::vector<double>{0.5, 0.6}), c10::ValueError);
  CHECK_THROWS_AS(average_checkpoints({}, out), c10::ValueError);
  CHECK(folder.files().size() == 2);
}

// Tests what an adapter file says of its base: weights that the file replaces, and fields of its
// configuration.
#include "catch.h"
#include "relative_error.h"

#include <memory>
#include <string>

#include <ATen/ATen.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/nn.h>

#include "adapters/lora_model.h"
#include "folder.h"

using Catch::Matchers::Contains;
using shoestring::TensorDict;
namespace lora = shoestring::lora;
namespace nn = shoestring::nn;

namespace {

constexpr int64_t kRows = 12, kHidden = 64;
const std::string kPrefix = "base_model.model.", kFile = "adapter_model.safetensors";

// A language model whose vocabulary can be resized: an embedding, one layer with an adapter, and a head.
struct LanguageModelImpl : torch::nn::Module {
  explicit LanguageModelImpl(int64_t rows = kRows) {
    torch::manual_seed(7);
    embed = register_module("embed", nn::AdaptableEmbedding(rows, kHidden));
    up = register_module("up_proj", AdaptableLinear(kHidden, kHidden));
    head = register_module("head", AdaptableLinear(nn::AdaptableLinearOptions(kHidden, rows).bias(false)));
  }
  Tensor forward(const Tensor& ids) { return head(up(embed(ids))); }

  nn::AdaptableEmbedding embed = nullptr;
  AdaptableLinear up = nullptr, head = nullptr;
};
TORCH_MODULE(LanguageModel);

// Saves an adapter of up_proj, with new weights of the embedding and of the head. Returns the tensors of the
// file.
TensorDict save_rows(const Folder& folder, bool tied) {
  LanguageModel model;
  lora::apply(*model, ApplyOptions().adapter(LoraOptions().rank(2).alpha(4)).target_modules({"up_proj"}));
  change(*model->up->adapters["default"]);
  lora::save_adapter(*model, folder.path);
  TensorDict tensors = shoestring::load_safetensors(folder / kFile);
  tensors.insert(kPrefix + "embed.weight", at::randn({kRows, kHidden}));
  tensors.insert(kPrefix + "head.weight",
                 tied ? tensors[kPrefix + "embed.weight"].clone() : at::randn({kRows, kHidden}));
  shoestring::save_safetensors(folder / kFile, tensors);
  return tensors;
}

// Returns the logits of the model with the tensors of the file, in fp64.
Tensor exact(LanguageModel& model, const TensorDict& file, const Tensor& ids) {
  const auto wide = [&](const std::string& name) { return file[kPrefix + name].to(at::kDouble); };
  const Tensor A = wide("up_proj.lora_A.weight"), B = wide("up_proj.lora_B.weight");
  const Tensor weight = model->up->weight.detach().to(at::kDouble) + 2 * B.mm(A);
  const Tensor hidden =
      at::linear(wide("embed.weight").index({ids}), weight, model->up->bias.detach().to(at::kDouble));
  return at::linear(hidden, wide("head.weight"));
}

}  // namespace

TEST_CASE("load_adapter loads the rows of a resized vocabulary", "[lora]") {
  const Folder folder;
  const TensorDict file = save_rows(folder, false);
  const Tensor ids = at::arange(kRows), rows = file[kPrefix + "head.weight"];
  LanguageModel model;
  lora::load_adapter(*model, folder.path);
  CHECK(relative_error(model->forward(ids), exact(model, file, ids)) < 2e-6);
  // the same into a base in 4 bits, whose head has an adapter in the second file
  for (const char* name : {"head.weight", "head.base_layer.weight"}) {
    CAPTURE(name);
    TensorDict renamed = file;
    renamed.erase(kPrefix + "head.weight");
    renamed.insert(kPrefix + name, rows);
    shoestring::save_safetensors(folder / kFile, renamed);
    LanguageModel quantised;
    quantised->head->quantize();
    lora::load_adapter(*quantised, folder.path);
    CHECK(at::equal(quantised->head->base->packed.flatten(), std::get<0>(shoestring::quantize_4bit(rows))));
    CHECK(at::equal(quantised->embed->weight, file[kPrefix + "embed.weight"]));
  }
}

TEST_CASE("load_adapter finds weights of a module that is called base_layer", "[lora]") {
  const Folder folder;
  const TensorDict file = save_rows(folder, false);
  TensorDict renamed;
  for (const auto& item : file)
    renamed.insert(kPrefix + "net.base_layer." + item.key().substr(kPrefix.size()), item.value());
  shoestring::save_safetensors(folder / kFile, renamed);
  LanguageModel model;
  torch::nn::Module outer;
  const auto net = outer.register_module("net", std::make_shared<torch::nn::Module>());
  net->register_module("base_layer", model);
  lora::load_adapter(outer, folder.path);
  CHECK(at::equal(model->embed->weight, file[kPrefix + "embed.weight"]));
  CHECK(at::equal(model->head->weight, file[kPrefix + "head.weight"]));
  const Tensor ids = at::arange(kRows);
  CHECK(relative_error(model->forward(ids), exact(model, file, ids)) < 2e-6);
}

TEST_CASE("load_adapter keeps tied rows tied, and refuses others", "[lora]") {
  const Folder same, others;
  const TensorDict file = save_rows(same, true);
  save_rows(others, false);
  const Tensor ids = at::arange(kRows);
  LanguageModel model;
  model->head->weight = model->embed->weight;
  const Tensor former = model->forward(ids);
  CHECK_THROWS_WITH(lora::load_adapter(*model, others.path),
                    Contains("expected the values of the layer to which it is tied, received others. Untie"));
  CHECK(at::equal(model->forward(ids), former));
  lora::load_adapter(*model, same.path);
  CHECK(model->head->weight.is_same(model->embed->weight));
  CHECK(relative_error(model->forward(ids), exact(model, file, ids)) < 2e-6);
  LanguageModel smaller(kRows - 2);
  CHECK_THROWS_WITH(lora::load_adapter(*smaller, same.path),
                    Contains("Resize the vocabulary of the module to that of the file first"));
  CHECK(lora::adapter_names(*smaller).empty());
}

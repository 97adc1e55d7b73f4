#include <torch/nn/modules/embedding.h>
#include <torch/utils.h>

#include <shoestring/adapters/lora.h>
#include <shoestring/files/safetensors.h>
#include <shoestring/integrations/model_files.h>
#include <shoestring/nn.h>

#include "files/safetensors_files.h"

using at::Tensor;
using shoestring::LoadOptions;
using shoestring::placeholder;
using shoestring::SafetensorsFile;
using shoestring::TensorDict;
using shoestring::nn::AdaptableLinear;
using shoestring::nn::AdaptableLinearOptions;

namespace {

constexpr int64_t kVocab = 50, kTinyHidden = 64, kInner = 96;

// A model with an embedding, two linear layers, a norm and a head. If `tied`, the head uses the embedding's
// weight. All parameters are placeholders until a file is loaded.
struct TinyNetImpl : torch::nn::Module {
  explicit TinyNetImpl(bool tied) {
    embed = register_module(
        "embed",
        torch::nn::Embedding(
            torch::nn::EmbeddingOptions(kVocab, kTinyHidden)._weight(placeholder({kVocab, kTinyHidden}))));
    up =
        register_module("up", AdaptableLinear(AdaptableLinearOptions(kTinyHidden, kInner).placeholder(true)));
    down = register_module(
        "down", AdaptableLinear(AdaptableLinearOptions(kInner, kTinyHidden).bias(false).placeholder(true)));
    head = register_module(
        "head", AdaptableLinear(AdaptableLinearOptions(kTinyHidden, kVocab).bias(false).placeholder(true)));
    if (tied) head->weight = embed->weight;
    norm = register_parameter("norm", placeholder({kTinyHidden}));
    steps = register_buffer("steps", placeholder({}, at::kLong));
  }
  Tensor forward(const Tensor& tokens) { return head(norm * down(at::relu(up(embed(tokens))))); }

  torch::nn::Embedding embed = nullptr;
  AdaptableLinear up = nullptr, down = nullptr, head = nullptr;
  Tensor norm, steps;
};
TORCH_MODULE(TinyNet);

TensorDict tensors(bool tied) {
  torch::manual_seed(0);
  TensorDict dict;
  dict.insert("embed.weight", torch::randn({kVocab, kTinyHidden}));
  dict.insert("up.weight", torch::randn({kInner, kTinyHidden}));
  dict.insert("up.bias", torch::randn({kInner}));
  dict.insert("down.weight", torch::randn({kTinyHidden, kInner}));
  if (!tied) dict.insert("head.weight", torch::randn({kVocab, kTinyHidden}));
  dict.insert("norm", torch::randn({kTinyHidden}));
  dict.insert("steps", torch::full({}, 7, at::kLong));
  return dict;
}

void save_shards(const Folder& folder, const TensorDict& dict) {
  TensorDict shards[2];
  std::string index;
  size_t i = 0;
  for (const auto& item : dict) {
    const size_t shard = i++ % 2;
    shards[shard].insert(item.key(), item.value());
    index += (index.empty() ? "" : ",") + c10::str("\"", item.key(), "\":\"", shard, ".safetensors\"");
  }
  shoestring::save_safetensors(folder / "0.safetensors", shards[0]);
  shoestring::save_safetensors(folder / "1.safetensors", shards[1]);
  write(folder / "model.safetensors.index.json", "{\"weight_map\":{" + index + "}}");
}

Tensor logits(const TensorDict& d, const Tensor& tokens) {
  const Tensor hidden =
      at::relu(at::linear(at::embedding(d["embed.weight"], tokens), d["up.weight"], d["up.bias"]));
  return at::linear(d["norm"] * at::linear(hidden, d["down.weight"]),
                    d.contains("head.weight") ? d["head.weight"] : d["embed.weight"]);
}

const Tensor& tokens() {
  static const Tensor t = torch::arange(20);
  return t;
}

}  // namespace

TEST_CASE("load_model fills a module of placeholders from one file or shards", "[model_files]") {
  for (bool tied : {false, true}) {
    for (bool sharded : {false, true}) {
      CAPTURE(tied, sharded);
      const Folder folder;
      const TensorDict dict = tensors(tied);
      if (sharded) {
        save_shards(folder, dict);
      } else {
        shoestring::save_safetensors(folder / "model.safetensors", dict);
      }
      TinyNet net(tied);
      CHECK(net->up->weight.storage().nbytes() == sizeof(float));
      CHECK(net->up->weight.isnan().all().item<bool>());
      shoestring::load_model(*net, folder.path);
      CHECK(at::equal(net(tokens()), logits(dict, tokens())));
      CHECK(net->steps.item<int64_t>() == 7);
      CHECK(net->up->weight.requires_grad());
      CHECK(net->head->weight.is_same(net->embed->weight) == tied);
      // Load the file a second time, into parameters that already have values.
      shoestring::load_model(*net, folder.path, LoadOptions().dtype(at::kDouble));
      CHECK(net->up->bias.scalar_type() == at::kDouble);
      CHECK(net->steps.scalar_type() == at::kLong);
      if (sharded) continue;
      const Folder saved;
      shoestring::load_model(*net, folder.path);
      shoestring::save_model(*net, saved.path);
      CHECK(SafetensorsFile(saved / "model.safetensors").entries().size() == dict.size());
    }
  }
}

TEST_CASE("load_model quantises what arrives, and save_model keeps it", "[model_files]") {
  const Folder folder, saved;
  const TensorDict dict = tensors(false);
  shoestring::save_safetensors(folder / "model.safetensors", dict);
  for (const char* type : {"nf4", "fp4", "int4", "int8"}) {
    for (bool nested : {false, true}) {
      if (nested && type[0] == 'i') continue;
      CAPTURE(type, nested);
      TinyNet net(false);
      shoestring::load_model(
          *net, folder.path,
          LoadOptions().quantize(type).double_quant(nested).skip({"head"}).dtype(at::kBFloat16));
      CHECK(net->up->is_quantized());
      CHECK(net->up->base->dtype == at::kBFloat16);
      CHECK_FALSE(net->head->is_quantized());
      CHECK(net->head->weight.scalar_type() == at::kBFloat16);
      AdaptableLinear same(AdaptableLinearOptions(kTinyHidden, kInner));
      same->weight.set_data(dict["up.weight"]);
      same->quantize(shoestring::QuantizeOptions().quant_type(type), nested);
      CHECK(at::equal(net->up->base->packed, same->base->packed));
      CHECK(at::equal(net->up->base->absmax, same->base->absmax));

      shoestring::save_model(*net, saved.path);
      TinyNet again(false);
      shoestring::load_model(*again, saved.path);
      CHECK(at::equal(net(tokens()), again(tokens())));
      // A layer that is already quantised stays quantised: load_model quantises the dense weight from the
      // file.
      shoestring::load_model(*net, folder.path);
      CHECK(at::equal(net->up->base->packed, same->base->packed));
    }
  }
}

TEST_CASE("load_model calls a function for each tensor, in the order of the module", "[model_files]") {
  const Folder folder;
  save_shards(folder, tensors(false));
  TinyNet net(false);
  std::vector<std::string> names;
  shoestring::load_model(*net, folder.path,
                         LoadOptions().quantize("nf4").loaded([&](const std::string& name) {
                           names.push_back(name);
                           if (name == "up.bias") CHECK(net->up->is_quantized());
                           if (name == "embed.weight")
                             CHECK(net->embed->weight.sum().isfinite().item<bool>());
                         }));
  CHECK(names == std::vector<std::string>{"norm", "steps", "embed.weight", "up.weight", "up.bias",
                                          "down.weight", "head.weight"});
  TinyNet other(false);
  const auto stop = [](const std::string& name) {
    if (name == "up.weight") throw std::runtime_error("mine");
  };
  CHECK_THROWS_AS(shoestring::load_model(*other, folder.path, LoadOptions().loaded(stop)),
                  std::runtime_error);
}

TEST_CASE("load_model fills a QuantizedLinear of the model's own", "[model_files]") {
  const Folder folder, saved;
  const std::string path = folder / "model.safetensors";
  const TensorDict all = tensors(false);
  TensorDict dict;
  for (const char* name : {"up.weight", "up.bias"}) dict.insert(name, all[name]);
  shoestring::save_safetensors(path, dict);
  const auto form = shoestring::nn::QuantizedLinearOptions(kTinyHidden, kInner).double_quant(true);
  shoestring::nn::QuantizedLinear layer(form);
  torch::nn::Module net;
  net.register_module("up", layer);
  shoestring::load_model(net, path);
  const auto [packed, absmax] = shoestring::quantize_4bit(dict["up.weight"]);
  CHECK(at::equal(layer->packed.flatten(), packed));
  CHECK(at::equal(layer->bias, dict["up.bias"]));

  shoestring::save_model(net, saved.path);
  layer->set_weight(torch::zeros({kInner, kTinyHidden}));
  shoestring::load_model(net, saved.path);
  CHECK(at::equal(layer->packed.flatten(), packed));
  expect(message([&] { layer->set_parts(packed, absmax, Tensor(), {}); }), "second: expected nested scales");
  expect(message([&] { layer->set_parts(packed.slice(0, 1), absmax, Tensor(), {}); }), "packed");

  torch::nn::Module plain;
  plain.register_module("up", std::make_shared<shoestring::nn::QuantizedLinearImpl>(kTinyHidden, kInner));
  // the module was built without nested scales; loading a file with nested scales must change this
  shoestring::load_model(plain, saved.path);
  CHECK(plain.named_buffers().contains("up.nested"));
  shoestring::load_model(plain, path);
  shoestring::nn::QuantizedLinear unnested(shoestring::nn::QuantizedLinearOptions(kTinyHidden, kInner));
  torch::nn::Module other;
  other.register_module("up", unnested);
  shoestring::save_model(other, folder.path);
  expect(message([&] { shoestring::load_model(net, folder.path); }),
         "\"up.weight\": expected nested scales, as the QuantizedLinear has them");
}

TEST_CASE("a tied head stays dense, and adapters train over a loaded model", "[model_files]") {
  const Folder folder;
  shoestring::save_safetensors(folder / "model.safetensors", tensors(true));
  TinyNet net(true);
  shoestring::load_model(*net, folder.path, LoadOptions().quantize("nf4"));
  CHECK_FALSE(net->head->is_quantized());
  shoestring::lora::apply(*net, shoestring::lora::ApplyOptions().target_modules({"up", "down"}));
  net(tokens()).sum().backward();
  CHECK((*net->up->adapters["default"])["lora_B"].grad().defined());
  CHECK_FALSE(net->embed->weight.grad().defined());
  CHECK_THROWS_WITH(shoestring::load_model(*net, folder.path), Catch::Matchers::Contains("up has one"));
}

TEST_CASE("load_model refuses two values for one tensor", "[model_files]") {
  const Folder folder;
  TensorDict dict = tensors(true);
  dict.insert("head.weight", dict["embed.weight"].clone());
  shoestring::save_safetensors(folder / "model.safetensors", dict);
  TinyNet net(true);
  shoestring::load_model(*net, folder.path);
  CHECK(at::equal(net(tokens()), logits(dict, tokens())));
  TinyNet other(true);
  for (const char* quantize : {"none", "nf4"}) {
    TinyNet saved(false);
    shoestring::save_safetensors(folder / "model.safetensors", tensors(false));
    shoestring::load_model(*saved, folder.path, LoadOptions().quantize(quantize));
    shoestring::save_model(*saved, folder.path);
    expect(message([&] { shoestring::load_model(*other, folder.path); }),
           "\"head.weight\": expected the values of \"embed.weight\", whose tensor the module uses for both, "
           "received others. Build the module with a tensor for each of the two");
    CHECK(other->embed->weight.isnan().all().item<bool>());
    CHECK(other->norm.isnan().all().item<bool>());
  }
}

TEST_CASE("a merge parts tied layers, and unmerge ties them again", "[model_files]") {
  const Folder folder, merged;
  shoestring::save_safetensors(folder / "model.safetensors", tensors(true));
  TinyNet net(true);
  shoestring::load_model(*net, folder.path);
  const Tensor former = net(tokens());
  const auto options = [](const char* init) {
    return shoestring::lora::ApplyOptions()
        .adapter(shoestring::nn::LoraOptions().rank(2).init(init))
        .target_modules({"head"});
  };
  for (const char* init : {"pissa", "olora"}) {
    expect(message([&] { shoestring::lora::apply(*net, options(init)); }),
           "init: expected layers with a weight of their own for '" + std::string(init) + "'");
  }
  expect(message([&] {
           shoestring::lora::apply(
               *net, shoestring::lora::ApplyOptions().target_modules({"up"}).modules_to_save({"head"}));
         }),
         "modules_to_save: expected modules with parameters of their own, received head");
  CHECK(at::equal(net(tokens()), former));
  shoestring::lora::apply(*net, options("gaussian"));
  {
    const torch::NoGradGuard no_grad;
    (*net->head->adapters["default"])["lora_B"].normal_();
  }
  shoestring::lora::merge(*net);
  const Tensor expected = net(tokens());
  CHECK_FALSE(at::allclose(expected, former));
  shoestring::save_model(*net, merged.path);
  TinyNet again(false);
  shoestring::load_model(*again, merged.path);
  CHECK(at::equal(again(tokens()), expected));
  shoestring::lora::unmerge(*net);
  CHECK(net->head->weight.is_same(net->embed->weight));
}

TEST_CASE("load_model refuses what does not fit and leaves the module as it was", "[model_files]") {
  const Folder folder;
  const std::string path = folder / "model.safetensors";
  const auto received = [&](const TensorDict& dict, const LoadOptions& options = {}) {
    shoestring::save_safetensors(path, dict);
    TinyNet net(false);
    const std::string text = message([&] { shoestring::load_model(*net, folder.path, options); });
    CHECK(net->embed->weight.isnan().all().item<bool>());
    CHECK(text.find('\n') == std::string::npos);
    return text;
  };
  TensorDict missing = tensors(true);
  expect(received(missing), "load_model: " + folder.path +
                                ": \"head.weight\": expected a tensor of shape [50, 64], received none");
  missing.erase("norm");
  expect(received(missing), "received none; 1 more are missing");
  TensorDict surplus = tensors(false);
  surplus.insert("layers.0.inv_freq", torch::ones({4}));
  expect(received(surplus),
         path + ": \"layers.0.inv_freq\": expected a tensor that the module has, received one of shape [4]");
  shoestring::save_safetensors(path, surplus);
  TinyNet net(false);
  shoestring::load_model(*net, path, LoadOptions().ignore({"inv_freq"}));
  TensorDict shape = tensors(false);
  shape["up.weight"] = torch::ones({kTinyHidden, kInner});
  expect(
      received(shape),
      path +
          ": \"up.weight\": expected shape [96, 64] of fp32, bf16, fp16 or fp64, received [64, 96] of Float");
  shape["up.weight"] = torch::ones({kInner, kTinyHidden}, at::kByte);
  expect(received(shape), "received [96, 64] of Byte");
  TensorDict dtype = tensors(false);
  dtype["steps"] = torch::ones({});
  expect(received(dtype), "\"steps\": expected shape [] of Long, received [] of Float");
  expect(received(tensors(false), LoadOptions().quantize("nf5")),
         "quantize: expected none, nf4, fp4, int4 or int8, received 'nf5'");
  expect(received(tensors(false), LoadOptions().quantize("int4").double_quant(true)),
         "double_quant: expected false with int4");
  expect(received(tensors(false), LoadOptions().quantize("nf4").block_size(60)),
         "block_size: expected a power of two");
  expect(received(tensors(false), LoadOptions().dtype(at::kInt)), "dtype: expected a floating-point type");
  expect(received(tensors(false), LoadOptions().quantize("int8").double_quant(true)),
         "double_quant: expected the defaults with int8");
}

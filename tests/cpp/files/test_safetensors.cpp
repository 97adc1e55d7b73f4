#include <ATen/ATen.h>
#include <shoestring/files/safetensors.h>

#include "files/safetensors_files.h"

using at::Tensor;
using shoestring::SafetensorsFile;
using shoestring::TensorDict;

namespace {

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

// Returns how much of this process's mapped files is resident in memory, in KiB.
int64_t mapped_kib() {
  const std::string status = read("/proc/self/status"), key = "RssFile:";
  return std::stoll(status.substr(status.find(key) + key.size()));
}

}  // namespace

TEST_CASE("save_safetensors does not keep what it reads from a mapped file", "[safetensors]") {
  Folder folder;
  const int64_t size = int64_t{8} << 20;
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const Tensor mapped = at::from_file(folder / "mapped", true, size, options);
  mapped.copy_(at::arange(size, options));
  const Tensor part = mapped.narrow(0, 3, size - 5);
  const int64_t before = mapped_kib();
  shoestring::save_safetensors(folder / "saved", TensorDict({{"part", part}}));
  // saving the mapped tensor has released its pages; before, nearly all of the 32 MiB were resident
  CHECK(mapped_kib() < before - 20000);
  CHECK(at::equal(shoestring::load_safetensors(folder / "saved")["part"], at::arange(3, size - 2, options)));
  CHECK(at::equal(part, at::arange(3, size - 2, options)));
}

TEST_CASE("safetensors keeps every dtype, shape and byte", "[safetensors]") {
  Folder folder;
  TensorDict tensors;
  for (auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                     at::kChar, at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64,
                     at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e8m0fnu}) {
    const std::string name = c10::toString(dtype);
    const int64_t width = c10::elementSize(dtype);
    const auto bytes = at::randint(dtype == at::kBool ? 2 : 256, {3, 5 * width}, at::kByte);
    tensors.insert(name, bytes.view(dtype));
    tensors.insert(name + ".scalar", bytes.view({-1}).narrow(0, 0, width).clone().view(dtype).view({}));
    tensors.insert(name + ".empty", at::empty({2, 0, 7}, dtype));
  }
  const std::string path = folder / "all.safetensors";
  shoestring::save_safetensors(path, tensors, {{"format", "pt"}, {"note", "a \"quoted\"\nline: ü"}});

  SafetensorsFile opened(path);
  CHECK(opened.metadata().at("note") == "a \"quoted\"\nline: ü");
  CHECK(opened.entries().size() == tensors.size());
  CHECK_FALSE(opened.contains("nothing"));
  for (const auto& item : tensors) {
    CAPTURE(item.key());
    CHECK(same_bytes(opened.load(item.key()), item.value()));
    Tensor into = at::empty_like(item.value());
    opened.load_into(item.key(), into);
    CHECK(same_bytes(into, item.value()));
  }
  TensorDict loaded = shoestring::load_safetensors(path);
  CHECK(loaded.size() == tensors.size());
  // The file stores tensors of the widest dtype first, in whatever order they are given, so that every tensor
  // is aligned.
  CHECK(loaded[0].key() == "UInt64");
  CHECK(folder.files().size() == 1);

  shoestring::save_safetensors(path, TensorDict());
  CHECK(read(path) == file("{}      ", 0));
  CHECK(shoestring::load_safetensors(path).is_empty());
}

TEST_CASE("save_safetensors writes the bytes of the Python package", "[safetensors]") {
  // The expected bytes are the output of safetensors.torch.save, version 0.8.0, for the same tensors.
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
      R"("h":{"dtype":"BF16","shape":[1,1],"data_offsets":[16,18]},)"
      R"("e":{"dtype":"F16","shape":[0,3],"data_offsets":[18,18]},)"
      R"("a":{"dtype":"BOOL","shape":[3],"data_offsets":[18,21]}}   )";
  const char data[] =
      "\x07\0\0\0\0\0\0\0"
      "\0\0\x80\x3f\0\0\x20\xc0"
      "\0\x3f"
      "\x01\0\x01";
  Folder folder;
  TensorDict tensors;
  tensors.insert("b", at::tensor({1.0f, -2.5f}));
  tensors.insert("a", at::tensor({1, 0, 1}).to(at::kBool));
  tensors.insert("s", at::scalar_tensor(7, at::kLong));
  tensors.insert("e", at::empty({0, 3}, at::kHalf));
  tensors.insert("h", at::full({1, 1}, 0.5, at::kBFloat16));
  shoestring::save_safetensors(folder / "golden", tensors, {{"format", "pt"}});
  CHECK(read(folder / "golden") == with_length(header.size(), header + std::string(data, sizeof data - 1)));
}

TEST_CASE("safetensors: views are saved as they look, parameters are loaded in place", "[safetensors]") {
  Folder folder;
  TensorDict tensors;
  const Tensor base = at::arange(12, at::kFloat).view({3, 4});
  tensors.insert("transposed", base.t());
  tensors.insert("negated", at::_neg_view(base));
  tensors.insert("weight", at::ones({2}).requires_grad_());
  shoestring::save_safetensors(folder / "views", tensors);
  SafetensorsFile opened(folder / "views");
  CHECK(opened.load("transposed").equal(base.t()));
  CHECK(opened.load("negated").equal(-base));

  Tensor strided = at::zeros({3, 4}).t(), parameter = at::zeros({2}).requires_grad_();
  opened.load_into("transposed", strided);
  CHECK(strided.equal(base.t()));
  opened.load_into("weight", parameter);
  CHECK(parameter.equal(at::ones({2})));
  CHECK(parameter.requires_grad());
  expect(message([&] { opened.load_into("weight", at::zeros({3})); }),
         "tensor \"weight\": expected shape [3] of Float, the file has [2] of Float");
  expect(message([&] { opened.load("bias"); }), "there is no tensor \"bias\"");
}

TEST_CASE("load_safetensors reads a model directory, in one file or in shards", "[safetensors]") {
  Folder folder;
  const auto refused = [&] { return message([&] { shoestring::load_safetensors(folder.path); }); };
  expect(refused(), "expected model.safetensors or model.safetensors.index.json in this folder");

  TensorDict first, second;
  first.insert("a", at::ones({2}));
  first.insert("unlisted", at::ones({1}));
  second.insert("b", at::zeros({3}));
  shoestring::save_safetensors(folder / "model-1.safetensors", first);
  shoestring::save_safetensors(folder / "model-2.safetensors", second);
  const std::string index = folder / "model.safetensors.index.json";
  const auto map = [&](const std::string& b) {
    write(index, R"({"metadata":{},"weight_map":{"a":"model-1.safetensors","b":)" + b + "}}");
  };
  map(R"("model-2.safetensors")");
  TensorDict loaded = shoestring::load_safetensors(folder.path);
  CHECK(loaded.keys() == std::vector<std::string>{"a", "b"});
  CHECK(loaded["b"].equal(at::zeros({3})));

  map(R"("model-1.safetensors")");
  expect(refused(), "model-1.safetensors: there is no tensor \"b\"");
  map(R"("model-3.safetensors")");
  expect(refused(), "model-3.safetensors: cannot open: No such file");
  map(R"("../model-2.safetensors")");
  expect(refused(), "tensor \"b\": expected a file in the same folder, received \"../model-2");
  map("5");
  expect(refused(), "tensor \"b\": expected the name of a file");
  write(index, R"({"weight_map":[]})");
  expect(refused(), "expected an object with the object weight_map");
  write(index, "{");
  expect(refused(), "model.safetensors.index.json: not valid JSON");

  std::rename((folder / "model-2.safetensors").c_str(), (folder / "model.safetensors").c_str());
  CHECK(shoestring::load_safetensors(folder.path).keys() == std::vector<std::string>{"b"});
}

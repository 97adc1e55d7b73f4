// Tests AutocastGuard against the semantics of torch.autocast.

#include <shoestring/core/amp.h>

#include <thread>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "catch.h"

using at::autocast::get_autocast_dtype;
using at::autocast::is_autocast_cache_enabled;
using at::autocast::is_autocast_enabled;
using Catch::Contains;
using shoestring::AutocastGuard;

namespace {

at::ScalarType product_dtype() { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); }

}  // namespace

TEST_CASE("an autocast guard casts products and restores the settings before", "[autocast]") {
  const auto before = get_autocast_dtype(at::kCPU);
  CHECK(product_dtype() == at::kFloat);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const AutocastGuard guard(at::kCPU, dtype);
    CHECK(product_dtype() == dtype);
    CHECK(!is_autocast_enabled(at::kCUDA));
  }
  CHECK(product_dtype() == at::kFloat);
  CHECK(get_autocast_dtype(at::kCPU) == before);
  CHECK(!is_autocast_enabled(at::kCPU));
}

TEST_CASE("autocast guards nest", "[autocast]") {
  const AutocastGuard outer(at::kCPU, at::kBFloat16, true, /*cache_enabled=*/false);
  {
    const AutocastGuard off(at::kCPU, at::kFloat, /*enabled=*/false);
    CHECK(product_dtype() == at::kFloat);
    CHECK(is_autocast_cache_enabled());
    {
      const AutocastGuard inner(at::kCPU, at::kHalf);
      CHECK(product_dtype() == at::kHalf);
    }
    CHECK(product_dtype() == at::kFloat);
  }
  CHECK(product_dtype() == at::kBFloat16);
  CHECK(!is_autocast_cache_enabled());
  try {
    const AutocastGuard inner(at::kCPU, at::kHalf);
    throw std::runtime_error("leaves the scope");
  } catch (const std::runtime_error&) {
  }
  CHECK(product_dtype() == at::kBFloat16);
}

TEST_CASE("an autocast guard changes one device type and one thread", "[autocast]") {
  const AutocastGuard guard(at::kCUDA, at::kHalf);
  CHECK(is_autocast_enabled(at::kCUDA));
  CHECK(product_dtype() == at::kFloat);
  {
    const AutocastGuard inner(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
  }
  // The guard of the CPU has restored the settings of the CPU only.
  CHECK(get_autocast_dtype(at::kCUDA) == at::kBFloat16);
  bool enabled = true;
  std::thread([&] { enabled = is_autocast_enabled(at::kCUDA); }).join();
  CHECK(!enabled);
}

TEST_CASE("the outermost autocast guard clears the cache of cast weights", "[autocast]") {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(), x = at::ones({2, 2});
  const auto product = [&] { return at::mm(x, weight)[0][0].item<float>(); };
  {
    const AutocastGuard outer(at::kCPU, at::kBFloat16);
    {
      const AutocastGuard inner(at::kCPU, at::kBFloat16);
      CHECK(product() == 2);
      weight.detach().fill_(3);  // the cache of cast weights does not notice
    }
    CHECK(product() == 2);  // the end of the inner guard keeps the cache
    const AutocastGuard uncached(at::kCPU, at::kBFloat16, true, /*cache_enabled=*/false);
    CHECK(product() == 6);
  }
  const AutocastGuard next(at::kCPU, at::kBFloat16);
  CHECK(product() == 6);
}

TEST_CASE("an autocast guard refuses devices and dtypes without autocast", "[autocast]") {
  const auto guard = [](c10::DeviceType device, at::ScalarType dtype) { AutocastGuard(device, dtype); };
  CHECK_THROWS_WITH(guard(at::kCPU, at::kFloat),
                    Contains("AutocastGuard: dtype: expected BFloat16 or Half, which autocast on cpu "
                             "supports, received Float. Pass enabled=false to turn autocast off."));
  CHECK_THROWS_WITH(guard(at::kCUDA, at::kDouble), Contains("autocast on cuda supports, received Double"));
  CHECK_THROWS_WITH(guard(at::kMeta, at::kHalf),
                    Contains("AutocastGuard: device: expected a device type with autocast (cpu, cuda, ") &&
                        Contains("), received meta. Pass the type"));
  CHECK(product_dtype() == at::kFloat);
  // A refused guard has not opened a region, so the next guard is the outermost and clears the cache.
  const int nesting = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  CHECK(nesting == 1);
}

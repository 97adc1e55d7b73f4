#include "generator.h"

#include <array>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>

namespace simdev {
namespace {

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  GeneratorImpl(int device, at::Generator cpu)
      : c10::GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override {
    wait();
    cpu.set_current_seed(seed);
  }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override {
    wait();
    return cpu.seed();
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simdev: generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "simdev: generators have no offset"); }
  // On a GPU the state is the host's, so these do not count as synchronisations.
  void set_state(const c10::TensorImpl& state) override {
    wait();
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    wait();
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator cpu;
  Position last;  // the last operation that uses the generator; guarded by records()

 private:
  void wait() const {
    Position position;
    {
      const std::lock_guard lock(records());
      position = last;
    }
    wait_silently(position);
  }
  GeneratorImpl* clone_impl() const override {
    wait();
    return new GeneratorImpl(device().index(), cpu.clone());
  }
};

at::Generator make(int device, uint64_t seed) {
  return at::make_generator<GeneratorImpl>(device, at::detail::createCPUGenerator(seed));
}

GeneratorImpl& impl_of(const at::Generator& g) {
  return *static_cast<GeneratorImpl*>(g.unsafeGetGeneratorImpl());
}

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto& all = *new std::array<at::Generator, kDevices>([] {
    std::array<at::Generator, kDevices> generators;
    for (int d = 0; d < kDevices; ++d) generators[d] = make(d, c10::detail::getNonDeterministicRandom());
    return generators;
  }());
  return all[device < 0 ? current_device() : device];
}

at::Generator new_generator(int device) {
  return make(device < 0 ? current_device() : device, c10::default_rng_seed_val);
}

Draw::Draw(const at::Generator& generator, int device, const char* operation)
    : generator_(generator.defined() ? generator : default_generator(device)) {
  const c10::Device expected(kType, static_cast<c10::DeviceIndex>(device));
  TORCH_CHECK(generator_.device() == expected, operation, ": generator: expected one of ", expected,
              ", received one of ", generator_.device(), ". Make it with torch.Generator(device).");
  const std::lock_guard lock(records());
  earlier_ = impl_of(generator_).last;
}

const at::Generator& Draw::cpu_generator() const { return impl_of(generator_).cpu; }
void Draw::wait_for_earlier() const { wait_silently(earlier_); }
void Draw::set_position(const Position& position) {
  const std::lock_guard lock(records());
  impl_of(generator_).last = position;
}

}  // namespace simdev

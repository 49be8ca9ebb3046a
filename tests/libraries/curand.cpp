// cuRAND's host API: every generator with a fixed seed, and every distribution.
#include <curand.h>

#include "library.h"

using library::Buffer;

inline std::string statusText(curandStatus_t status) { return "cuRAND error " + std::to_string(status); }

namespace {

constexpr size_t kCount = 1 << 18;

class Generator {
 public:
  explicit Generator(curandRngType_t type) : quasi_(type >= CURAND_RNG_QUASI_DEFAULT) {
    TRY(curandCreateGenerator(&generator_, type));
    if (quasi_)
      TRY(curandSetQuasiRandomGeneratorDimensions(generator_, 4));
    else
      TRY(curandSetPseudoRandomGeneratorSeed(generator_, 20241120));
  }
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;
  ~Generator() { curandDestroyGenerator(generator_); }
  operator curandGenerator_t() const { return generator_; }

 private:
  curandGenerator_t generator_ = nullptr;
  bool quasi_;
};

// Random numbers are checked by their mean and variance.
template <typename T>
void distributed(const std::string& name, const std::vector<T>& values, double mean, double variance) {
  double sum = 0, squares = 0;
  for (const T& each : values) sum += double(each);
  const double got = sum / double(values.size());
  for (const T& each : values) squares += (double(each) - got) * (double(each) - got);
  const double spread = squares / double(values.size());
  const std::vector<double> both = {got, spread};
  library::result(name.c_str(), values, 0, [&](size_t at) { return library::value(values[at]); });
  library::result((name + ", mean and variance").c_str(), both, 0.03,
                  [&](size_t at) { return at == 0 ? mean : variance; });
}

void uniform(const char* name, curandRngType_t type) {
  library::operation(name, [&] {
    const Generator generator(type);
    const Buffer<float> out(kCount, 0xff);
    TRY(curandGenerateUniform(generator, out, kCount));
    distributed(std::string(name) + " uniform", out.read(), 0.5, 1.0 / 12);
    TRY(curandGenerateNormal(generator, out, kCount, 1, 2));
    distributed(std::string(name) + " normal", out.read(), 1, 4);
    const Buffer<double> wide(kCount, 0xff);
    TRY(curandGenerateUniformDouble(generator, wide, kCount));
    distributed(std::string(name) + " double", wide.read(), 0.5, 1.0 / 12);
  });
}

void others() {
  const Generator generator(CURAND_RNG_PSEUDO_PHILOX4_32_10);
  const Buffer<unsigned> integers(kCount, 0xff);
  TRY(curandGenerate(generator, integers, kCount));
  std::vector<double> scaled;
  for (const unsigned each : integers.read()) scaled.push_back(each / 4294967296.0);
  distributed("integers", scaled, 0.5, 1.0 / 12);
  TRY(curandGeneratePoisson(generator, integers, kCount, 6.5));
  distributed("Poisson", integers.read(), 6.5, 6.5);
  const Buffer<float> out(kCount, 0xff);
  TRY(curandGenerateLogNormal(generator, out, kCount, 0, 0.25f));
  distributed("log-normal", out.read(), std::exp(0.03125), (std::exp(0.0625) - 1) * std::exp(0.0625));
}

// An offset skips: the second half of a sequence is the sequence from its middle.
void offset() {
  const Generator whole(CURAND_RNG_PSEUDO_PHILOX4_32_10), half(CURAND_RNG_PSEUDO_PHILOX4_32_10);
  const Buffer<float> all(kCount, 0xff), rest(kCount / 2, 0xff);
  TRY(curandGenerateUniform(whole, all, kCount));
  TRY(curandSetGeneratorOffset(half, kCount / 2));
  TRY(curandGenerateUniform(half, rest, kCount / 2));
  const auto expected = all.read();
  library::result("offset", rest.read(), 0, [&](size_t at) { return expected[kCount / 2 + at]; }, 1000);
}

}  // namespace

int main() {
  uniform("XORWOW", CURAND_RNG_PSEUDO_XORWOW);
  uniform("MRG32K3A", CURAND_RNG_PSEUDO_MRG32K3A);
  uniform("MTGP32", CURAND_RNG_PSEUDO_MTGP32);
  uniform("MT19937", CURAND_RNG_PSEUDO_MT19937);
  uniform("Philox", CURAND_RNG_PSEUDO_PHILOX4_32_10);
  uniform("Sobol 32", CURAND_RNG_QUASI_SOBOL32);
  uniform("scrambled Sobol 32", CURAND_RNG_QUASI_SCRAMBLED_SOBOL32);
  library::operation("Philox, other distributions", others);
  library::operation("offset", offset);
  return library::finish();
}

// NVIDIA's libraries as applications use them: one large product, one large transform. They are loaded at run
// time with the few declarations needed, so that this program builds and runs where they are not installed.

#include <dlfcn.h>

#include <memory>
#include <stdexcept>

#include "perf/cases.h"
#include "perf/driver.h"

namespace gpupool::perf {
namespace {

constexpr int kSide = 4096;
constexpr size_t kElements = size_t{kSide} * kSide;

class Library {
 public:
  explicit Library(const char* name) : handle_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(::dlerror());
  }
  template <class F>
  F* function(const char* name) const {
    void* found = ::dlsym(handle_, name);
    if (found == nullptr) throw std::runtime_error(std::string(name) + " is missing");
    return reinterpret_cast<F*>(found);
  }

 private:
  void* handle_;  // stays loaded: the libraries have threads and exit handlers of their own
};

void good(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string(what) + " returned " + std::to_string(status));
}

std::shared_ptr<DeviceMemory> filled(size_t words) {
  auto memory = std::make_shared<DeviceMemory>(words * sizeof(float));
  ok(cuda().cuMemsetD32Async(memory->address(), 0x3f000000, words, nullptr));  // 0.5f
  return memory;
}

// cublas_api.h: handles are pointers, CUBLAS_OP_N is 0, statuses are ints with 0 for success.
Steps sgemm(Gpu& gpu) {
  Library library("libcublas.so.13");
  auto create = library.function<int(void**)>("cublasCreate_v2");
  auto setStream = library.function<int(void*, CUstream)>("cublasSetStream_v2");
  auto destroy = library.function<int(void*)>("cublasDestroy_v2");
  auto multiply = library.function<int(void*, int, int, int, int, int, const float*, const float*, int,
                                       const float*, int, const float*, float*, int)>("cublasSgemm_v2");
  void* raw = nullptr;
  good(create(&raw), "cublasCreate");
  std::shared_ptr<void> handle(raw, [destroy](void* h) { destroy(h); });
  good(setStream(raw, gpu.stream()), "cublasSetStream");
  auto a = filled(kElements), b = filled(kElements), c = filled(kElements);
  ok(cuda().cuCtxSynchronize());
  return {{},
          [=, &gpu] {
            const float one = 1, zero = 0;
            good(multiply(handle.get(), 0, 0, kSide, kSide, kSide, &one,
                          reinterpret_cast<const float*>(a->address()), kSide,
                          reinterpret_cast<const float*>(b->address()), kSide, &zero,
                          reinterpret_cast<float*>(c->address()), kSide),
                 "cublasSgemm");
            gpu.synchronize();
          },
          {}};
}

// cufft.h: plans are ints, CUFFT_C2C is 0x29, CUFFT_FORWARD is -1.
Steps fft2(Gpu& gpu) {
  constexpr int kComplexToComplex = 0x29, kForward = -1;
  Library library("libcufft.so.12");
  auto plan2d = library.function<int(int*, int, int, int)>("cufftPlan2d");
  auto setStream = library.function<int(int, CUstream)>("cufftSetStream");
  auto destroy = library.function<int(int)>("cufftDestroy");
  auto transform = library.function<int(int, void*, void*, int)>("cufftExecC2C");
  int plan = 0;
  good(plan2d(&plan, kSide, kSide, kComplexToComplex), "cufftPlan2d");
  std::shared_ptr<int> owner(new int(plan), [destroy](int* p) {
    destroy(*p);
    delete p;
  });
  good(setStream(plan, gpu.stream()), "cufftSetStream");
  auto from = filled(kElements * 2), to = filled(kElements * 2);
  ok(cuda().cuCtxSynchronize());
  return {{},
          [=, &gpu] {
            good(transform(*owner, reinterpret_cast<void*>(from->address()),
                           reinterpret_cast<void*>(to->address()), kForward),
                 "cufftExecC2C");
            gpu.synchronize();
          },
          {}};
}

}  // namespace

void addLibraryCases(std::vector<Case>& cases) {
  cases.push_back({"sgemm-4096", sgemm});
  cases.push_back({"fft2-4096", fft2});
}

}  // namespace gpupool::perf

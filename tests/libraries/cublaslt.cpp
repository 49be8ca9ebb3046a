// cuBLASLt: matrix products of every type, with epilogues, by the heuristics' first choice and an explicit
// workspace.
#include <cublasLt.h>

#include "library.h"

using library::Buffer;
using library::numbers;
using library::value;

inline std::string statusText(cublasStatus_t status) { return cublasLtGetStatusString(status); }

namespace {

constexpr size_t kWorkspace = 32 << 20;

// D(m x n) = epilogue(op(A) B), A stored k x m and used transposed: the form every type has kernels for.
struct Product {
  const char* name;
  cublasComputeType_t compute;
  cudaDataType_t scale;
  uint64_t m, n, k;
  double tolerance;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  int batch = 1;
  bool transposed = true;
};

template <typename T>
constexpr cudaDataType_t typeOf() {
  if constexpr (std::is_same_v<T, double>)
    return CUDA_R_64F;
  else if constexpr (std::is_same_v<T, float>)
    return CUDA_R_32F;
  else if constexpr (std::is_same_v<T, __half>)
    return CUDA_R_16F;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return CUDA_R_16BF;
  else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
    return CUDA_R_8F_E4M3;
  else if constexpr (std::is_same_v<T, int8_t>)
    return CUDA_R_8I;
  else
    return CUDA_R_32I;
}

struct Layout {
  Layout(cudaDataType_t type, uint64_t rows, uint64_t columns, int batch) {
    TRY(cublasLtMatrixLayoutCreate(&layout, type, rows, columns, rows));
    const int64_t stride = rows * columns;
    TRY(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    TRY(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                         sizeof stride));
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(layout); }
  cublasLtMatrixLayout_t layout;
};

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& to) {
  TRY(cublasLtMatmulDescSetAttribute(operation, attribute, &to, sizeof to));
}

double epilogue(cublasLtEpilogue_t kind, double x, double bias) {
  if (kind == CUBLASLT_EPILOGUE_BIAS || kind == CUBLASLT_EPILOGUE_RELU_BIAS ||
      kind == CUBLASLT_EPILOGUE_GELU_BIAS)
    x += bias;
  if (kind == CUBLASLT_EPILOGUE_RELU_BIAS) return std::max(x, 0.0);
  if (kind == CUBLASLT_EPILOGUE_GELU || kind == CUBLASLT_EPILOGUE_GELU_BIAS)
    return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  return x;
}

void sayAlgorithm(const char* name, const cublasLtMatmulHeuristicResult_t& choice, int found) {
  int id = 0;
  uint32_t tile = 0, stages = 0, splits = 0;
  size_t written = 0;
  TRY(cublasLtMatmulAlgoConfigGetAttribute(&choice.algo, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &written));
  TRY(cublasLtMatmulAlgoConfigGetAttribute(&choice.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile,
                                           &written));
  TRY(cublasLtMatmulAlgoConfigGetAttribute(&choice.algo, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages,
                                           sizeof stages, &written));
  TRY(cublasLtMatmulAlgoConfigGetAttribute(&choice.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                           sizeof splits, &written));
  check::say("%s: algorithm %d, tile %u, stages %u, split %u, workspace %zu; %d found", name, id, tile,
             stages, splits, choice.workspaceSize, found);
}

template <typename In, typename Out, typename Scale>
void multiply(cublasLtHandle_t handle, const Product& p) {
  const auto a = numbers<In>(p.m * p.k * p.batch, 1), b = numbers<In>(p.k * p.n * p.batch, 2);
  const auto bias = numbers<Out>(p.m, 3);
  const Buffer<In> deviceA(a), deviceB(b);
  const Buffer<Out> deviceD(p.m * p.n * p.batch, 0xff), deviceBias(bias);
  const Buffer<char> workspace(kWorkspace);
  const Buffer<float> one(std::vector<float>{1});

  cublasLtMatmulDesc_t operation;
  TRY(cublasLtMatmulDescCreate(&operation, p.compute, p.scale));
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.epilogue != CUBLASLT_EPILOGUE_DEFAULT) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
  if (p.epilogue != CUBLASLT_EPILOGUE_DEFAULT && p.epilogue != CUBLASLT_EPILOGUE_GELU)
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, deviceBias.get());
  if constexpr (std::is_same_v<In, __nv_fp8_e4m3>) {
    set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, one.get());
    set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, one.get());
  }
  const Layout layoutA(typeOf<In>(), p.transposed ? p.k : p.m, p.transposed ? p.m : p.k, p.batch);
  const Layout layoutB(typeOf<In>(), p.k, p.n, p.batch), layoutD(typeOf<Out>(), p.m, p.n, p.batch);

  cublasLtMatmulPreference_t preference;
  TRY(cublasLtMatmulPreferenceCreate(&preference));
  TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace,
                                           sizeof kWorkspace));
  cublasLtMatmulHeuristicResult_t choices[4];
  int found = 0;
  TRY(cublasLtMatmulAlgoGetHeuristic(handle, operation, layoutA.layout, layoutB.layout, layoutD.layout,
                                     layoutD.layout, preference, 4, choices, &found));
  if (found == 0) throw library::Failure{"the heuristics found no algorithm"};
  sayAlgorithm(p.name, choices[0], found);

  const Scale alpha = 1, beta = 0;
  TRY(cublasLtMatmul(handle, operation, &alpha, deviceA.get(), layoutA.layout, deviceB.get(), layoutB.layout,
                     &beta, deviceD.get(), layoutD.layout, deviceD.get(), layoutD.layout, &choices[0].algo,
                     workspace.get(), kWorkspace, nullptr));
  library::result(p.name, deviceD.read(), p.tolerance, [&](size_t at) {
    const size_t matrix = at / (p.m * p.n), column = at % (p.m * p.n) / p.m, row = at % p.m;
    double sum = 0;
    for (size_t i = 0; i < p.k; ++i)
      sum += value(a[matrix * p.m * p.k + (p.transposed ? row * p.k + i : i * p.m + row)]) *
             value(b[matrix * p.k * p.n + column * p.k + i]);
    return epilogue(p.epilogue, sum, value(bias[row]));
  });
  TRY(cublasLtMatmulPreferenceDestroy(preference));
  TRY(cublasLtMatmulDescDestroy(operation));
}

template <typename In, typename Out = In, typename Scale = float>
void product(cublasLtHandle_t handle, const Product& p) {
  library::operation(p.name, [&] { multiply<In, Out, Scale>(handle, p); });
}

void plainProducts(cublasLtHandle_t handle) {
  product<double, double, double>(handle, {"fp64 512", CUBLAS_COMPUTE_64F, CUDA_R_64F, 512, 512, 512, 1e-12});
  product<float>(handle, {"fp32 2048", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2048, 2048, 2048, 1e-4});
  product<float>(handle, {"tf32 2048", CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F, 2048, 2048, 2048, 5e-2});
  product<__half>(handle, {"fp16 2048", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2048, 2048, 2048, 2e-2});
  product<__half, float>(handle,
                         {"fp16 to fp32 2048", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2048, 2048, 2048, 1e-3});
  product<__nv_bfloat16>(handle, {"bf16 2048", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2048, 2048, 2048, 5e-2});
  product<int8_t, int32_t, int32_t>(handle,
                                    {"int8 2048", CUBLAS_COMPUTE_32I, CUDA_R_32I, 2048, 2048, 2048, 0});
  product<__nv_fp8_e4m3, __nv_bfloat16>(
      handle, {"fp8 to bf16 2048", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2048, 2048, 2048, 5e-2});
  Product plain{"fp16 2048 untransposed", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2048, 2048, 2048, 2e-2};
  plain.transposed = false;
  product<__half>(handle, plain);
  plain.name = "bf16 2048 untransposed";
  plain.tolerance = 5e-2;
  product<__nv_bfloat16>(handle, plain);
}

// A linear layer as frameworks ask for it: 16 rows of 768 in, 2304 out.
void linearLayers(cublasLtHandle_t handle) {
  Product layer{"", CUBLAS_COMPUTE_32F, CUDA_R_32F, 2304, 16, 768, 5e-2};
  layer.name = "bf16 16x768x2304";
  product<__nv_bfloat16>(handle, layer);
  layer.name = "fp16 16x768x2304";
  product<__half>(handle, layer);
  layer.epilogue = CUBLASLT_EPILOGUE_BIAS;
  layer.name = "fp16 16x768x2304, bias";
  product<__half>(handle, layer);
  layer.name = "bf16 16x768x2304, bias";
  product<__nv_bfloat16>(handle, layer);
  layer.epilogue = CUBLASLT_EPILOGUE_GELU_BIAS;
  layer.name = "bf16 16x768x2304, bias and GELU";
  product<__nv_bfloat16>(handle, layer);
  layer.name = "fp32 16x768x2304, bias and GELU";
  product<float>(handle, layer);
  layer.epilogue = CUBLASLT_EPILOGUE_GELU;
  layer.name = "fp16 16x768x2304, GELU";
  product<__half>(handle, layer);
  layer.epilogue = CUBLASLT_EPILOGUE_RELU_BIAS;
  layer.name = "fp16 16x768x2304, bias and ReLU";
  product<__half>(handle, layer);
}

void batchedProducts(cublasLtHandle_t handle) {
  Product batch{"fp16 12 x 128x128x64", CUBLAS_COMPUTE_32F, CUDA_R_32F, 128, 128, 64, 1e-2};
  batch.batch = 12;
  product<__half>(handle, batch);
  batch.name = "fp32 12 x 128x128x64";
  product<float>(handle, batch);
  batch.name = "bf16 12 x 128x128x64";
  batch.tolerance = 5e-2;
  product<__nv_bfloat16>(handle, batch);
}

}  // namespace

int main() {
  cublasLtHandle_t handle;
  library::operation("create", [&] {
    TRY(cublasLtCreate(&handle));
    plainProducts(handle);
    linearLayers(handle);
    batchedProducts(handle);
    TRY(cublasLtDestroy(handle));
  });
  return library::finish();
}

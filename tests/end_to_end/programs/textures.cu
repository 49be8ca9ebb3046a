// Arrays and textures: point and linear filtering, every address mode, one to three dimensions, layers,
// linear and pitched memory, normalised coordinates and reading integers as floats; surfaces that write.
#include "check.h"

template <typename T>
static cudaArray_t makeArray(const std::vector<T>& values, int width, int height, int depth,
                             unsigned flags = 0) {
  cudaArray_t array;
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<T>();
  CUDA(cudaMalloc3DArray(&array, &format, make_cudaExtent(width, height, depth), flags));
  cudaMemcpy3DParms copy = {};
  copy.srcPtr =
      make_cudaPitchedPtr(const_cast<T*>(values.data()), width * sizeof(T), width, height ? height : 1);
  copy.dstArray = array;
  copy.extent = make_cudaExtent(width, height ? height : 1, depth ? depth : 1);
  copy.kind = cudaMemcpyHostToDevice;
  CUDA(cudaMemcpy3D(&copy));
  return array;
}

static cudaTextureObject_t makeTexture(const cudaResourceDesc& resource, int dimensions,
                                       cudaTextureAddressMode address, cudaTextureFilterMode filter,
                                       bool normalized, cudaTextureReadMode read = cudaReadModeElementType) {
  cudaTextureDesc description = {};
  // Only of the dimensions there are: a border around the missing ones would be mixed in.
  for (int i = 0; i < dimensions; ++i) description.addressMode[i] = address;
  description.filterMode = filter;
  description.readMode = read;
  description.normalizedCoords = normalized;
  description.borderColor[0] = -7;
  cudaTextureObject_t texture = 0;
  CUDA(cudaCreateTextureObject(&texture, &resource, &description, nullptr));
  return texture;
}

static cudaResourceDesc fromArray(cudaArray_t array) {
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeArray;
  resource.res.array.array = array;
  return resource;
}

struct Coordinates {
  float x, y, z;
};

__global__ void sample1D(cudaTextureObject_t texture, const Coordinates* at, float* output, int count) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < count) output[i] = tex1D<float>(texture, at[i].x);
}
__global__ void sample2D(cudaTextureObject_t texture, const Coordinates* at, float* output, int count) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < count) output[i] = tex2D<float>(texture, at[i].x, at[i].y);
}
__global__ void sample3D(cudaTextureObject_t texture, const Coordinates* at, float* output, int count) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < count) output[i] = tex3D<float>(texture, at[i].x, at[i].y, at[i].z);
}
__global__ void sampleLayered(cudaTextureObject_t texture, const Coordinates* at, float* output, int count) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < count) output[i] = tex2DLayered<float>(texture, at[i].x, at[i].y, static_cast<int>(at[i].z));
}
__global__ void fetchLinear(cudaTextureObject_t texture, int4* output, int count) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i < count) output[i] = tex1Dfetch<int4>(texture, i);
}

// What a texture unit does, in double; weights have 8 fractional bits.
struct Model {
  const std::vector<float>& values;
  int width, height, depth;
  cudaTextureAddressMode address;
  bool linear, normalized;

  static double weight(double fraction) { return std::floor(fraction * 256 + 0.5) / 256; }
  int wrap(int i, int size, bool& border) const {
    if (i >= 0 && i < size) return i;
    switch (address) {
      case cudaAddressModeWrap:
        return ((i % size) + size) % size;
      case cudaAddressModeMirror: {
        const int period = ((i % (2 * size)) + 2 * size) % (2 * size);
        return period < size ? period : 2 * size - 1 - period;
      }
      case cudaAddressModeBorder:
        border = true;
        return 0;
      default:
        return i < 0 ? 0 : size - 1;
    }
  }
  double texel(int x, int y, int z) const {
    bool border = false;
    x = wrap(x, width, border);
    y = wrap(y, height, border);
    z = wrap(z, depth, border);
    return border ? -7.0 : values[(z * height + y) * width + x];
  }
  double operator()(Coordinates at, int dimensions) const {
    double x = normalized ? static_cast<double>(at.x) * width : at.x, y = 0.5, z = 0.5;
    if (dimensions > 1) y = normalized ? static_cast<double>(at.y) * height : at.y;
    if (dimensions > 2) z = normalized ? static_cast<double>(at.z) * depth : at.z;
    if (!linear) return texel(std::floor(x), std::floor(y), std::floor(z));
    x -= 0.5, y -= 0.5, z -= 0.5;
    const int i = std::floor(x), j = std::floor(y), k = std::floor(z);
    const double a = weight(x - i), b = weight(y - j), c = weight(z - k);
    double sum = 0;
    for (int corner = 0; corner < 8; ++corner) {
      const double share = (corner & 1 ? a : 1 - a) * (corner & 2 ? b : 1 - b) * (corner & 4 ? c : 1 - c);
      if (share != 0) sum += share * texel(i + (corner & 1), j + (corner >> 1 & 1), k + (corner >> 2));
    }
    return sum;
  }
};

// Coordinates inside and around the texture, away from the edges between texels where rounding decides.
static std::vector<Coordinates> coordinates(int count, const Model& model) {
  check::Random random(20);
  const auto pick = [&](int size) {
    const int texel = static_cast<int>(random.below(3 * size)) - size;
    const float at = texel + (0.125f + 0.75f * random.below(33) / 32.0f);
    return model.normalized ? at / size : at;
  };
  std::vector<Coordinates> at(count);
  for (Coordinates& one : at) {
    one.x = pick(model.width);
    one.y = pick(model.height);
    one.z = pick(model.depth);
  }
  return at;
}

template <typename Kernel>
static void compare(const char* name, Kernel kernel, cudaTextureObject_t texture, const Model& model,
                    int dimensions, double tolerance) {
  const int count = 600;
  const std::vector<Coordinates> at = coordinates(count, model);
  check::Device<Coordinates> deviceAt(at);
  check::Device<float> output(count);
  kernel<<<(count + 127) / 128, 128>>>(texture, deviceAt, output, count);
  CUDA(cudaGetLastError());
  std::vector<double> expected;
  for (const Coordinates& one : at) expected.push_back(model(one, dimensions));
  check::near(name, output.read(), expected, 0, tolerance);
  CUDA(cudaDestroyTextureObject(texture));
}

static void filtered() {
  const int width = 16, height = 8, depth = 4;
  const std::vector<float> values = check::randomFloats(width * height * depth, 21, 0, 10);
  const cudaArray_t line = makeArray(values, width, 0, 0), plane = makeArray(values, width, height, 0),
                    volume = makeArray(values, width, height, depth);
  struct Case {
    const char* name;
    cudaTextureAddressMode address;
    bool linear, normalized;
  };
  const Case cases[] = {{"point clamp", cudaAddressModeClamp, false, false},
                        {"point border", cudaAddressModeBorder, false, false},
                        {"point wrap", cudaAddressModeWrap, false, true},
                        {"point mirror", cudaAddressModeMirror, false, true},
                        {"linear clamp", cudaAddressModeClamp, true, false},
                        {"linear border", cudaAddressModeBorder, true, false},
                        {"linear wrap", cudaAddressModeWrap, true, true},
                        {"linear mirror", cudaAddressModeMirror, true, true}};
  for (const Case& one : cases) {
    const cudaTextureFilterMode filter = one.linear ? cudaFilterModeLinear : cudaFilterModePoint;
    // Weights in hardware may round either way: one part in 256 of a span of 17 per dimension.
    const double tolerance = one.linear ? 0.15 : 0;
    char name[64];
    const auto texture = [&](cudaArray_t array, int dimensions) {
      return makeTexture(fromArray(array), dimensions, one.address, filter, one.normalized);
    };
    std::snprintf(name, sizeof name, "1D %s", one.name);
    compare(name, sample1D, texture(line, 1),
            Model{values, width, 1, 1, one.address, one.linear, one.normalized}, 1, tolerance);
    std::snprintf(name, sizeof name, "2D %s", one.name);
    compare(name, sample2D, texture(plane, 2),
            Model{values, width, height, 1, one.address, one.linear, one.normalized}, 2, tolerance);
    std::snprintf(name, sizeof name, "3D %s", one.name);
    compare(name, sample3D, texture(volume, 3),
            Model{values, width, height, depth, one.address, one.linear, one.normalized}, 3, tolerance);
  }
  for (cudaArray_t array : {line, plane, volume}) CUDA(cudaFreeArray(array));
}

static void layered() {
  const int width = 8, height = 8, layers = 3;
  const std::vector<float> values = check::randomFloats(width * height * layers, 22, 0, 10);
  const cudaArray_t array = makeArray(values, width, height, layers, cudaArrayLayered);
  const cudaTextureObject_t texture =
      makeTexture(fromArray(array), 2, cudaAddressModeClamp, cudaFilterModePoint, false);
  std::vector<Coordinates> at;
  std::vector<float> expected;
  for (int i = 0; i < width * height * layers; ++i) {
    at.push_back({i % width + 0.5f, i / width % height + 0.5f, static_cast<float>(i / (width * height))});
    expected.push_back(values[i]);
  }
  check::Device<Coordinates> deviceAt(at);
  check::Device<float> output(at.size());
  sampleLayered<<<(at.size() + 127) / 128, 128>>>(texture, deviceAt, output, at.size());
  check::same("layers", output.read(), expected);
  CUDA(cudaDestroyTextureObject(texture));
  CUDA(cudaFreeArray(array));
}

// Textures over ordinary memory: an array of int4, and a pitched plane of bytes read as normalised floats.
static void overMemory() {
  const int count = 300;
  std::vector<int> numbers(count * 4), got;
  for (int i = 0; i < count * 4; ++i) numbers[i] = i * i - 5000;
  check::Device<int> memory(numbers);
  cudaResourceDesc resource = {};
  resource.resType = cudaResourceTypeLinear;
  resource.res.linear.devPtr = memory;
  resource.res.linear.desc = cudaCreateChannelDesc<int4>();
  resource.res.linear.sizeInBytes = numbers.size() * sizeof(int);
  cudaTextureObject_t texture = makeTexture(resource, 1, cudaAddressModeClamp, cudaFilterModePoint, false);
  check::Device<int4> output(count);
  fetchLinear<<<3, 128>>>(texture, output, count);
  for (const int4& value : output.read()) got.insert(got.end(), {value.x, value.y, value.z, value.w});
  check::same("linear memory", got, numbers);
  CUDA(cudaDestroyTextureObject(texture));

  const int width = 32, height = 16;
  std::vector<unsigned char> bytes(width * height);
  std::vector<float> scaled;
  check::Random random(23);
  for (unsigned char& value : bytes) scaled.push_back((value = random.below(256)) / 255.0f);
  unsigned char* plane;
  size_t pitch;
  CUDA(cudaMallocPitch(&plane, &pitch, width, height));
  CUDA(cudaMemcpy2D(plane, pitch, bytes.data(), width, width, height, cudaMemcpyHostToDevice));
  resource = {};
  resource.resType = cudaResourceTypePitch2D;
  resource.res.pitch2D.devPtr = plane;
  resource.res.pitch2D.desc = cudaCreateChannelDesc<unsigned char>();
  resource.res.pitch2D.width = width;
  resource.res.pitch2D.height = height;
  resource.res.pitch2D.pitchInBytes = pitch;
  texture =
      makeTexture(resource, 2, cudaAddressModeClamp, cudaFilterModeLinear, true, cudaReadModeNormalizedFloat);
  compare("pitched bytes as floats", sample2D, texture,
          Model{scaled, width, height, 1, cudaAddressModeClamp, true, true}, 2, 0.02);
  CUDA(cudaFree(plane));
}

__global__ void invert(cudaSurfaceObject_t surface, int width, int height) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= width || y >= height) return;
  uchar4 value = surf2Dread<uchar4>(surface, x * 4, y);
  value = make_uchar4(255 - value.x, value.z, value.y, value.w + 1);
  surf2Dwrite(value, surface, x * 4, y);
}

__global__ void writeFloats(cudaSurfaceObject_t surface, int width) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  if (x < width) surf1Dwrite(0.5f * x, surface, x * 4);
}

static void surfaces() {
  const int width = 45, height = 30;
  std::vector<uchar4> image(width * height), back(width * height);
  check::Random random(24);
  for (uchar4& value : image)
    value = make_uchar4(random.below(256), random.below(256), random.below(256), random.below(256));
  const cudaArray_t array = makeArray(image, width, height, 0, cudaArraySurfaceLoadStore);
  cudaChannelFormatDesc format;
  cudaExtent extent;
  unsigned flags = 0;
  CUDA(cudaArrayGetInfo(&format, &extent, &flags, array));
  REQUIRE(format.x == 8 && format.w == 8 && format.f == cudaChannelFormatKindUnsigned);
  REQUIRE(extent.width == width && extent.height == height && (flags & cudaArraySurfaceLoadStore) != 0);
  cudaResourceDesc resource = fromArray(array);
  cudaSurfaceObject_t surface;
  CUDA(cudaCreateSurfaceObject(&surface, &resource));
  invert<<<dim3(3, 4), dim3(16, 8)>>>(surface, width, height);
  CUDA(cudaMemcpy2DFromArray(back.data(), width * 4, array, 0, 0, width * 4, height, cudaMemcpyDeviceToHost));
  for (int i = 0; i < width * height; ++i) {
    const uchar4 a = image[i], b = back[i];
    REQUIRE(b.x == 255 - a.x && b.y == a.z && b.z == a.y && b.w == static_cast<unsigned char>(a.w + 1));
  }
  check::say("surface: %d pixels are exact", width * height);
  CUDA(cudaDestroySurfaceObject(surface));
  CUDA(cudaFreeArray(array));

  // Written as a surface, sampled as a texture; and a part of an array copied in and out.
  const std::vector<float> zeros(64);
  const cudaArray_t line = makeArray(zeros, 64, 0, 0, cudaArraySurfaceLoadStore);
  resource = fromArray(line);
  CUDA(cudaCreateSurfaceObject(&surface, &resource));
  writeFloats<<<1, 64>>>(surface, 64);
  std::vector<Coordinates> at;
  std::vector<float> expected;
  for (int i = 0; i < 64; ++i) {
    at.push_back({i + 0.5f, 0, 0});
    expected.push_back(0.5f * i);
  }
  const cudaTextureObject_t texture =
      makeTexture(resource, 1, cudaAddressModeClamp, cudaFilterModePoint, false);
  check::Device<Coordinates> deviceAt(at);
  check::Device<float> output(64);
  sample1D<<<1, 64>>>(texture, deviceAt, output, 64);
  check::same("surface to texture", output.read(), expected);
  const float patch[3] = {100, 200, 300};
  CUDA(cudaMemcpy2DToArray(line, 10 * sizeof(float), 0, patch, sizeof patch, sizeof patch, 1,
                           cudaMemcpyHostToDevice));
  for (int i = 0; i < 3; ++i) expected[10 + i] = patch[i];
  sample1D<<<1, 64>>>(texture, deviceAt, output, 64);
  check::same("patched array", output.read(), expected);
  CUDA(cudaDestroyTextureObject(texture));
  CUDA(cudaDestroySurfaceObject(surface));
  CUDA(cudaFreeArray(line));
}

int main() {
  filtered();
  layered();
  overMemory();
  surfaces();
  return check::pass();
}

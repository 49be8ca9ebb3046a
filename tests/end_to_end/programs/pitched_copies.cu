// Two- and three-dimensional copies and memsets with pitches and offsets, in every direction.
#include "check.h"

// Reads element (x, y, z) of a pitched volume, so that the pitch reported is the pitch used.
__global__ void gather(const char* base, size_t pitch, int width, int height, int depth, int* output) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width * height * depth) return;
  const int x = i % width, y = i / width % height, z = i / (width * height);
  output[i] =
      *reinterpret_cast<const int*>(base + (static_cast<size_t>(z) * height + y) * pitch + x * sizeof(int));
}

static void planes() {
  const int width = 37, height = 21;
  std::vector<int> source(width * height), back(width * height), gathered;
  for (int i = 0; i < width * height; ++i) source[i] = i * 7;
  char* device;
  size_t pitch = 0;
  CUDA(cudaMallocPitch(&device, &pitch, width * sizeof(int), height));
  REQUIRE(pitch >= width * sizeof(int));
  const size_t row = width * sizeof(int);
  CUDA(cudaMemset2D(device, pitch, 0xee, row, height));
  CUDA(cudaMemcpy2D(device, pitch, source.data(), row, row, height, cudaMemcpyHostToDevice));
  check::Device<int> output(width * height);
  gather<<<(width * height + 127) / 128, 128>>>(device, pitch, width, height, 1, output);
  check::same("plane, by a kernel", output.read(), source);
  CUDA(cudaMemcpy2D(back.data(), row, device, pitch, row, height, cudaMemcpyDeviceToHost));
  check::same("plane, copied back", back, source);

  // A rectangle within: set, then moved within the device, then brought to a host image of another pitch.
  CUDA(cudaMemset2D(device + 3 * pitch + 8, pitch, 0x11, 5 * sizeof(int), 4));
  CUDA(cudaMemcpy2D(device + 10 * pitch + 40, pitch, device + 3 * pitch + 8, pitch, 6 * sizeof(int), 5,
                    cudaMemcpyDeviceToDevice));
  std::vector<int> image(width * height, -1), expected(width * height, -1), reference = source;
  for (int y = 3; y < 7; ++y)
    for (int x = 2; x < 7; ++x) reference[y * width + x] = 0x11111111;
  std::vector<int> moved = reference;
  for (int y = 0; y < 5; ++y)
    for (int x = 0; x < 6; ++x) moved[(10 + y) * width + 10 + x] = reference[(3 + y) * width + 2 + x];
  for (int y = 0; y < 12; ++y)
    for (int x = 0; x < 20; ++x) expected[(y + 4) * width + x + 1] = moved[(y + 5) * width + x + 3];
  CUDA(cudaMemcpy2D(image.data() + 4 * width + 1, row, device + 5 * pitch + 12, pitch, 20 * sizeof(int), 12,
                    cudaMemcpyDeviceToHost));
  check::same("rectangle", image, expected);
  CUDA_GIVES(cudaErrorInvalidPitchValue,
             cudaMemcpy2D(device, row - 1, source.data(), row, row, height, cudaMemcpyHostToDevice));
  cudaGetLastError();

  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaMemset2DAsync(device, pitch, 0, row, height, stream));
  CUDA(cudaMemcpy2DAsync(device + pitch, pitch, source.data(), row, row, 2, cudaMemcpyHostToDevice, stream));
  CUDA(cudaMemcpy2DAsync(back.data(), row, device, pitch, row, height, cudaMemcpyDefault, stream));
  CUDA(cudaStreamSynchronize(stream));
  for (int i = 0; i < width * height; ++i)
    REQUIRE(back[i] == (i / width == 1 || i / width == 2 ? source[i - width] : 0));
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaFree(device));
}

static void volumes() {
  const int width = 13, height = 9, depth = 7, count = width * height * depth;
  std::vector<int> source(count);
  for (int i = 0; i < count; ++i) source[i] = i * 3 + 1;
  cudaPitchedPtr device;
  const cudaExtent extent = make_cudaExtent(width * sizeof(int), height, depth);
  CUDA(cudaMalloc3D(&device, extent));
  REQUIRE(device.xsize == width * sizeof(int) && device.ysize == height);
  CUDA(cudaMemset3D(device, 0, extent));
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(source.data(), width * sizeof(int), width, height);
  copy.dstPtr = device;
  copy.extent = extent;
  copy.kind = cudaMemcpyHostToDevice;
  CUDA(cudaMemcpy3D(&copy));
  check::Device<int> output(count);
  gather<<<(count + 127) / 128, 128>>>(static_cast<char*>(device.ptr), device.pitch, width, height, depth,
                                       output);
  check::same("volume, by a kernel", output.read(), source);

  // A box at an offset into a box at another.
  std::vector<int> back(count, -5), expected(count, -5);
  copy = {};
  copy.srcPtr = device;
  copy.srcPos = make_cudaPos(2 * sizeof(int), 1, 3);
  copy.dstPtr = make_cudaPitchedPtr(back.data(), width * sizeof(int), width, height);
  copy.dstPos = make_cudaPos(5 * sizeof(int), 4, 0);
  copy.extent = make_cudaExtent(6 * sizeof(int), 5, 4);
  copy.kind = cudaMemcpyDeviceToHost;
  CUDA(cudaMemcpy3D(&copy));
  for (int z = 0; z < 4; ++z)
    for (int y = 0; y < 5; ++y)
      for (int x = 0; x < 6; ++x)
        expected[(z * height + y + 4) * width + x + 5] = source[((z + 3) * height + y + 1) * width + x + 2];
  check::same("box", back, expected);

  CUDA(cudaMemset3D(device, 0x22, make_cudaExtent(3 * sizeof(int), 2, depth)));
  std::vector<int> whole(count);
  copy = {};
  copy.srcPtr = device;
  copy.dstPtr = make_cudaPitchedPtr(whole.data(), width * sizeof(int), width, height);
  copy.extent = extent;
  copy.kind = cudaMemcpyDeviceToHost;
  CUDA(cudaMemcpy3DAsync(&copy, 0));
  CUDA(cudaStreamSynchronize(0));
  for (int i = 0; i < count; ++i) {
    const bool set = i % width < 3 && i / width % height < 2;
    REQUIRE(whole[i] == (set ? 0x22222222 : source[i]));
  }
  CUDA(cudaFree(device.ptr));
}

int main() {
  planes();
  volumes();
  return check::pass();
}

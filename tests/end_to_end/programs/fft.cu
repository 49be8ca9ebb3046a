// Radix-2 FFT by hand: bit reversal, one kernel per butterfly stage, forward and back again.
#include <complex>

#include "check.h"

__global__ void reverseBits(const float2* input, float2* output, int bits) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  output[__brev(i) >> (32 - bits)] = input[i];
}

__global__ void butterflies(float2* data, int half, float sign) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int k = i % half, top = (i / half) * half * 2 + k;
  float s, c;
  sincospif(sign * k / half, &s, &c);
  const float2 a = data[top], b = data[top + half];
  const float2 turned = make_float2(b.x * c - b.y * s, b.x * s + b.y * c);
  data[top] = make_float2(a.x + turned.x, a.y + turned.y);
  data[top + half] = make_float2(a.x - turned.x, a.y - turned.y);
}

static void transform(const float2* input, float2* output, int bits, float sign) {
  const int count = 1 << bits;
  reverseBits<<<count / 128, 128>>>(input, output, bits);
  for (int half = 1; half < count; half *= 2) butterflies<<<count / 256, 128>>>(output, half, sign);
  CUDA(cudaGetLastError());
}

static void reference(std::complex<double>* data, int count) {
  if (count == 1) return;
  std::vector<std::complex<double>> parts(count);
  for (int i = 0; i < count / 2; ++i) {
    parts[i] = data[2 * i];
    parts[count / 2 + i] = data[2 * i + 1];
  }
  reference(parts.data(), count / 2);
  reference(parts.data() + count / 2, count / 2);
  for (int i = 0; i < count / 2; ++i) {
    const std::complex<double> turned = std::polar(1.0, -2 * M_PI * i / count) * parts[count / 2 + i];
    data[i] = parts[i] + turned;
    data[count / 2 + i] = parts[i] - turned;
  }
}

static std::vector<float> flat(const std::vector<float2>& values, float scale) {
  std::vector<float> numbers;
  for (const float2& value : values) numbers.insert(numbers.end(), {value.x * scale, value.y * scale});
  return numbers;
}

int main(int argc, char** argv) {
  const int bits = check::option(argc, argv, "--bits", 13), count = 1 << bits;
  check::Random random(15);
  std::vector<float2> signal(count);
  std::vector<std::complex<double>> spectrum(count);
  for (int i = 0; i < count; ++i) {
    signal[i] = make_float2(random.between(-1, 1), random.between(-1, 1));
    spectrum[i] = {signal[i].x, signal[i].y};
  }
  reference(spectrum.data(), count);
  check::Device<float2> input(signal), output(count), back(count);
  transform(input, output, bits, -1);
  std::vector<double> expected;
  for (const auto& value : spectrum) expected.insert(expected.end(), {value.real(), value.imag()});
  check::near("spectrum", flat(output.read(), 1), expected, 1e-4, 1e-3);
  transform(output, back, bits, 1);
  check::near("and back", flat(back.read(), 1.0f / count), flat(signal, 1), 1e-5, 1e-5);
  return check::pass();
}

// Gravity between all pairs, positions tiled through shared memory, leapfrog steps.
#include "check.h"

constexpr float kSoftening = 0.01f, kStep = 0.001f;
constexpr int kBlock = 128;

__global__ void forces(const float4* bodies, float3* accelerations, int count) {
  __shared__ float4 tile[kBlock];
  const int i = blockIdx.x * kBlock + threadIdx.x;
  const float4 own = i < count ? bodies[i] : make_float4(0, 0, 0, 0);
  float3 sum = make_float3(0, 0, 0);
  for (int start = 0; start < count; start += kBlock) {
    const int other = start + threadIdx.x;
    tile[threadIdx.x] = other < count ? bodies[other] : make_float4(0, 0, 0, 0);
    __syncthreads();
    for (int k = 0; k < kBlock; ++k) {
      const float4 body = tile[k];
      const float x = body.x - own.x, y = body.y - own.y, z = body.z - own.z;
      const float inverse = rsqrtf(x * x + y * y + z * z + kSoftening);
      const float scale = body.w * inverse * inverse * inverse;
      sum.x += x * scale;
      sum.y += y * scale;
      sum.z += z * scale;
    }
    __syncthreads();
  }
  if (i < count) accelerations[i] = sum;
}

__global__ void move(float4* bodies, float3* velocities, const float3* accelerations, int count) {
  const int i = blockIdx.x * kBlock + threadIdx.x;
  if (i >= count) return;
  velocities[i].x += accelerations[i].x * kStep;
  velocities[i].y += accelerations[i].y * kStep;
  velocities[i].z += accelerations[i].z * kStep;
  bodies[i].x += velocities[i].x * kStep;
  bodies[i].y += velocities[i].y * kStep;
  bodies[i].z += velocities[i].z * kStep;
}

static std::vector<double> reference(const std::vector<float4>& start, int steps) {
  const size_t count = start.size();
  std::vector<double> position(count * 3), velocity(count * 3), acceleration(count * 3);
  for (size_t i = 0; i < count; ++i) {
    position[i * 3] = start[i].x;
    position[i * 3 + 1] = start[i].y;
    position[i * 3 + 2] = start[i].z;
  }
  for (int step = 0; step < steps; ++step) {
    for (size_t i = 0; i < count; ++i) {
      double sum[3] = {0, 0, 0};
      for (size_t k = 0; k < count; ++k) {
        double delta[3], square = kSoftening;
        for (int axis = 0; axis < 3; ++axis) {
          delta[axis] = position[k * 3 + axis] - position[i * 3 + axis];
          square += delta[axis] * delta[axis];
        }
        const double scale = start[k].w / (square * std::sqrt(square));
        for (int axis = 0; axis < 3; ++axis) sum[axis] += delta[axis] * scale;
      }
      for (int axis = 0; axis < 3; ++axis) acceleration[i * 3 + axis] = sum[axis];
    }
    for (size_t i = 0; i < count * 3; ++i) position[i] += (velocity[i] += acceleration[i] * kStep) * kStep;
  }
  return position;
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 600);
  const int steps = check::option(argc, argv, "--steps", 3);
  check::Random random(11);
  std::vector<float4> bodies(count);
  for (float4& body : bodies)
    body = make_float4(random.between(-1, 1), random.between(-1, 1), random.between(-1, 1), random.unit());
  const std::vector<double> expected = reference(bodies, steps);
  check::Device<float4> device(bodies);
  check::Device<float3> velocities(count), accelerations(count);
  CUDA(cudaMemset(velocities, 0, count * sizeof(float3)));
  const int blocks = (count + kBlock - 1) / kBlock;
  for (int step = 0; step < steps; ++step) {
    forces<<<blocks, kBlock>>>(device, accelerations, count);
    move<<<blocks, kBlock>>>(device, velocities, accelerations, count);
  }
  CUDA(cudaDeviceSynchronize());
  std::vector<float> got;
  for (const float4& body : device.read()) got.insert(got.end(), {body.x, body.y, body.z});
  check::near("positions", got, expected, 1e-5, 1e-5);
  return check::pass();
}

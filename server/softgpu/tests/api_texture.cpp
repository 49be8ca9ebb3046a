// Texture and surface objects, read by kernels.
#include <cmath>

#include "api_support.h"

using namespace apitest;

namespace {

struct Picture {
  CUarray array = nullptr;
  Picture(CUarray_format format, unsigned channels, unsigned bytes, size_t width, size_t height,
          const void* data, unsigned flags = 0) {
    CUDA_ARRAY3D_DESCRIPTOR d{};
    d.Width = width;
    d.Height = height;
    d.Format = format;
    d.NumChannels = channels;
    d.Flags = flags;
    OK(cuArray3DCreate(&array, &d));
    CUDA_MEMCPY2D c{};
    c.srcMemoryType = CU_MEMORYTYPE_HOST;
    c.srcHost = data;
    c.srcPitch = width * bytes;
    c.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    c.dstArray = array;
    c.WidthInBytes = width * bytes;
    c.Height = height;
    OK(cuMemcpy2D(&c));
  }
  ~Picture() { cuArrayDestroy(array); }
  CUDA_RESOURCE_DESC resource() const {
    CUDA_RESOURCE_DESC r{};
    r.resType = CU_RESOURCE_TYPE_ARRAY;
    r.res.array.hArray = array;
    return r;
  }
};

std::vector<float> fetch(const Session& session, CUtexObject texture, const std::vector<float>& at) {
  Buffer<float> where(at.size()), out(at.size() / 2);
  where.set(at);
  int n = int(at.size() / 2);
  OK(launch(session.function("fetch2D"), 32, 0, nullptr, texture, where.address, out.address, n));
  return out.get();
}

CUDA_TEXTURE_DESC textureDesc(CUaddress_mode mode, CUfilter_mode filter, unsigned flags) {
  CUDA_TEXTURE_DESC t{};
  for (auto& m : t.addressMode) m = mode;
  t.filterMode = filter;
  t.flags = flags;
  return t;
}

}  // namespace

TEST_CASE("two-dimensional fetches: points, linear filter, address modes") {
  Session session;
  const float texels[2][4] = {{0, 1, 2, 3}, {10, 11, 12, 13}};
  Picture picture(CU_AD_FORMAT_FLOAT, 1, 4, 4, 2, texels);
  auto resource = picture.resource();
  auto point = textureDesc(CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_POINT, 0);
  CUtexObject texture = 0;
  OK(cuTexObjectCreate(&texture, &resource, &point, nullptr));
  CHECK(fetch(session, texture, {0.5f, 0.5f, 3.9f, 1.2f, -4, -4, 100, 100}) ==
        std::vector<float>{0, 13, 0, 13});
  OK(cuTexObjectDestroy(texture));

  auto linear = textureDesc(CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_LINEAR, 0);
  OK(cuTexObjectCreate(&texture, &resource, &linear, nullptr));
  // Weights have eight fraction bits: a third becomes 85/256.
  auto got = fetch(session, texture, {1.0f, 0.5f, 1.0f, 1.0f, 0.5f + 1.0f / 3, 0.5f, 0, 0});
  CHECK(got[0] == 0.5f);
  CHECK(got[1] == 5.5f);
  CHECK(got[2] == 85.0f / 256);
  CHECK(got[3] == 0);
  OK(cuTexObjectDestroy(texture));

  auto wrap = textureDesc(CU_TR_ADDRESS_MODE_WRAP, CU_TR_FILTER_MODE_POINT, CU_TRSF_NORMALIZED_COORDINATES);
  OK(cuTexObjectCreate(&texture, &resource, &wrap, nullptr));
  CHECK(fetch(session, texture, {1.125f, 0.25f, -0.125f, 0.25f, 0.875f, 2.75f}) ==
        std::vector<float>{0, 3, 13});
  OK(cuTexObjectDestroy(texture));

  auto mirror =
      textureDesc(CU_TR_ADDRESS_MODE_MIRROR, CU_TR_FILTER_MODE_POINT, CU_TRSF_NORMALIZED_COORDINATES);
  OK(cuTexObjectCreate(&texture, &resource, &mirror, nullptr));
  CHECK(fetch(session, texture, {1.125f, 0.25f, -0.375f, 0.25f}) == std::vector<float>{3, 1});
  OK(cuTexObjectDestroy(texture));

  auto border = textureDesc(CU_TR_ADDRESS_MODE_BORDER, CU_TR_FILTER_MODE_POINT, 0);
  OK(cuTexObjectCreate(&texture, &resource, &border, nullptr));
  CHECK(fetch(session, texture, {-0.5f, 0.5f, 1.5f, 1.5f}) == std::vector<float>{0, 11});
  CUDA_TEXTURE_DESC back{};
  OK(cuTexObjectGetTextureDesc(&back, texture));
  CHECK(back.addressMode[0] == CU_TR_ADDRESS_MODE_BORDER);
  OK(cuTexObjectDestroy(texture));
}

TEST_CASE("integers read as normalised floats or as they are") {
  Session session;
  const unsigned char bytes[4] = {0, 51, 255, 128};
  Picture gray(CU_AD_FORMAT_UNSIGNED_INT8, 1, 1, 4, 1, bytes);
  auto resource = gray.resource();
  auto normalized = textureDesc(CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_POINT, 0);
  CUtexObject texture = 0;
  OK(cuTexObjectCreate(&texture, &resource, &normalized, nullptr));
  auto got = fetch(session, texture, {1.5f, 0.5f, 2.5f, 0.5f});
  CHECK(std::fabs(got[0] - 0.2f) < 1e-6f);
  CHECK(got[1] == 1);
  OK(cuTexObjectDestroy(texture));

  const unsigned char colours[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  Picture rgba(CU_AD_FORMAT_UNSIGNED_INT8, 4, 4, 2, 1, colours);
  resource = rgba.resource();
  auto raw = textureDesc(CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_POINT, CU_TRSF_READ_AS_INTEGER);
  OK(cuTexObjectCreate(&texture, &resource, &raw, nullptr));
  Buffer<int> out(2);
  OK(launch(session.function("fetchInt"), 2, 0, nullptr, texture, out.address, 2));
  CHECK(out.get() == std::vector<int>{4001, 8005});
  OK(cuTexObjectDestroy(texture));
}

TEST_CASE("linear memory as a texture reads zero outside") {
  Session session;
  Buffer<float> memory(3, 4.5f);
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_LINEAR;
  resource.res.linear.devPtr = memory.address;
  resource.res.linear.format = CU_AD_FORMAT_FLOAT;
  resource.res.linear.numChannels = 1;
  resource.res.linear.sizeInBytes = 12;
  auto desc = textureDesc(CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_POINT, 0);
  CUtexObject texture = 0;
  OK(cuTexObjectCreate(&texture, &resource, &desc, nullptr));
  Buffer<float> out(5);
  OK(launch(session.function("fetch1D"), 8, 0, nullptr, texture, out.address, 5));
  CHECK(out.get() == std::vector<float>{0, 4.5f, 4.5f, 4.5f, 0});
  OK(cuTexObjectDestroy(texture));
}

TEST_CASE("surfaces are read and written in place") {
  Session session;
  const float texels[2][4] = {{0, 1, 2, 3}, {10, 11, 12, 13}};
  Picture picture(CU_AD_FORMAT_FLOAT, 1, 4, 4, 2, texels, CUDA_ARRAY3D_SURFACE_LDST);
  auto resource = picture.resource();
  CUsurfObject surface = 0;
  OK(cuSurfObjectCreate(&surface, &resource));
  int w = 4;
  void* parameters[] = {&surface, &w};
  OK(cuLaunchKernel(session.function("surfaceDouble"), 2, 1, 1, 4, 1, 1, 0, nullptr, parameters, nullptr));
  OK(cuCtxSynchronize());
  float out[8] = {};
  CUDA_MEMCPY2D c{};
  c.srcMemoryType = CU_MEMORYTYPE_ARRAY;
  c.srcArray = picture.array;
  c.dstMemoryType = CU_MEMORYTYPE_HOST;
  c.dstHost = out;
  c.dstPitch = 16;
  c.WidthInBytes = 16;
  c.Height = 2;
  OK(cuMemcpy2D(&c));
  CHECK(out[3] == 6);
  CHECK(out[4] == 20);
  OK(cuSurfObjectDestroy(surface));
}

TEST_CASE("handles of textures are the lowest free numbers") {
  Session session;
  const float texels[4] = {};
  Picture picture(CU_AD_FORMAT_FLOAT, 1, 4, 4, 1, texels);
  auto resource = picture.resource();
  auto desc = textureDesc(CU_TR_ADDRESS_MODE_CLAMP, CU_TR_FILTER_MODE_POINT, 0);
  CUtexObject first = 0, second = 0, third = 0;
  OK(cuTexObjectCreate(&first, &resource, &desc, nullptr));
  OK(cuTexObjectCreate(&second, &resource, &desc, nullptr));
  CHECK(second == first + 1);
  OK(cuTexObjectDestroy(second));
  OK(cuTexObjectCreate(&third, &resource, &desc, nullptr));
  CHECK(third == second);
  OK(cuTexObjectDestroy(third));
  OK(cuTexObjectDestroy(first));
}

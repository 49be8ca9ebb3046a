// Green contexts, from a client that is not ours: parts that there are not, handles of others, and ends in
// the wrong order.
#include "schema/session_calls.h"
#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server::test;
using schema::SmSource;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr uint64_t kGreen = makeHandle(handles::Kind::greenContext, 1, 1);
constexpr uint64_t kInner = makeHandle(handles::Kind::greenContext, 2, 1);

SmSource part(uint32_t index, uint32_t wanted = 2) {
  SmSource source{};
  source.split = 1;
  source.minCount = 2;
  source.wanted = wanted;
  source.part = index;
  return source;
}

SmSource allOf(uint64_t green) {
  SmSource source{};
  source.green = reinterpret_cast<CUgreenCtx>(green);
  return source;
}

CUresult create(Client& client, uint64_t green, const std::vector<SmSource>& parts) {
  return client
      .await(ROW("sessionGreenCreate"), Arguments()
                                            .value(green)
                                            .value(0)
                                            .blob(parts.data(), parts.size() * sizeof(SmSource))
                                            .value(parts.size())
                                            .value(CU_GREEN_CTX_DEFAULT_STREAM))
      .status();
}

CUresult multiprocessors(Client& client, const SmSource& source, unsigned& count) {
  const Answer answer =
      client.await(ROW("sessionSmResource"),
                   Arguments().value(1).structure(source).value(CU_DEV_RESOURCE_TYPE_SM).value(1));
  if (answer.status() != CUDA_SUCCESS) return answer.status();
  schema::Reader in(answer.outputs);
  count = in.value<CUdevSmResource>().smCount;
  return in.bad() ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

CUresult makeStream(Client& client, uint64_t green) {
  return client
      .await(ROW("cuGreenCtxStreamCreate"),
             Arguments().value(kStream).value(green).value(CU_STREAM_NON_BLOCKING).value(0))
      .status();
}

}  // namespace

TEST_CASE("green contexts: parts, and parts of parts, by the calls that make them") {
  Client client;
  client.open();
  unsigned all = 0, mine = 0;
  CHECK(multiprocessors(client, {}, all) == CUDA_SUCCESS);
  CHECK(create(client, kGreen, {part(0), part(1)}) == CUDA_SUCCESS);
  CHECK(multiprocessors(client, allOf(kGreen), mine) == CUDA_SUCCESS);
  CHECK(mine == all);
  SmSource inner = part(0, 1);
  inner.green = reinterpret_cast<CUgreenCtx>(kGreen);
  CHECK(create(client, kInner, {inner}) == CUDA_SUCCESS);
  CHECK(multiprocessors(client, allOf(kInner), mine) == CUDA_SUCCESS);
  CHECK(mine == 2);
}

TEST_CASE("green contexts: parts that there are not") {
  Client client;
  client.open();
  CHECK(create(client, kGreen, {}) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(client, kGreen, {part(2)}) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(client, kGreen, {part(0, 0)}) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(client, kGreen, {part(0, ~0u)}) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(client, kGreen, std::vector<SmSource>(5000, part(0))) == CUDA_ERROR_INVALID_VALUE);
  SmSource other = part(1);
  other.split = 2;
  CHECK(create(client, kGreen, {part(0), allOf(0)}) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  CHECK(create(client, kInner, {part(0), other}) == CUDA_SUCCESS);  // of another split
  CHECK(client.await(ROW("cuGreenCtxDestroy"), Arguments().value(kInner)).status() == CUDA_SUCCESS);
  CHECK(create(client, kGreen, {allOf(0), allOf(0)}) == CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
  other = part(0);
  other.device = 7;
  CHECK(create(client, kGreen, {other}) == CUDA_ERROR_INVALID_DEVICE);
  for (const uint64_t stranger : {kGreen, kContext, uint64_t{0x7fff12345678}}) {
    unsigned none = 0;
    CHECK(create(client, kInner, {allOf(stranger)}) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(multiprocessors(client, allOf(stranger), none) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(makeStream(client, stranger) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(client.await(ROW("cuGreenCtxDestroy"), Arguments().value(stranger)).status() ==
          CUDA_ERROR_INVALID_HANDLE);
  }
}

TEST_CASE("green contexts: a part that is not one ends the session") {
  Client client;
  client.open();
  const SmSource source = part(0);
  client.post(ROW("sessionGreenCreate"),
              Arguments().value(kGreen).value(0).blob(&source, sizeof source - 4).value(1).value(1),
              Frame::kAwait);
  CHECK(contains(client.endedWith(), "do not fit"));
}

TEST_CASE("green contexts: their streams end with them, and they with their primary context") {
  Client client;
  client.open();
  REQUIRE(create(client, kGreen, {part(0)}) == CUDA_SUCCESS);
  REQUIRE(makeStream(client, kGreen) == CUDA_SUCCESS);
  const auto query = [&] { return client.await(ROW("cuStreamQuery"), Arguments().value(kStream)).status(); };
  CHECK(query() == CUDA_SUCCESS);
  SECTION("destroyed") {
    CHECK(client.await(ROW("cuGreenCtxDestroy"), Arguments().value(kGreen)).status() == CUDA_SUCCESS);
    CHECK(query() == CUDA_ERROR_INVALID_HANDLE);
  }
  SECTION("with the primary context") {
    client.context = 0;
    CHECK(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
    CHECK(client.await(ROW("cuGreenCtxDestroy"), Arguments().value(kGreen)).status() ==
          CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(client.await(ROW("cuDevicePrimaryCtxRetain"), Arguments().value(kContext).value(0)).status() ==
            CUDA_SUCCESS);
    client.context = kContext;
    CHECK(query() == CUDA_ERROR_INVALID_HANDLE);
    CHECK(create(client, kGreen, {part(0)}) == CUDA_SUCCESS);
  }
}

#include "server/worker/server_account.h"

#include <unistd.h>

#include "base/log.h"

namespace gpupool::server {
namespace {

ShareKey keyOf(const schema::ShareToken& token) {
  return {{token.server[0], token.server[1]}, {token.key[0], token.key[1]}};
}

}  // namespace

CUresult ServerAccount::take(unsigned place, uint64_t bytes) {
  const MemoryAnswer answer = process_.takeMemory(place, bytes);
  if (!answer.granted && !answer.error.empty())
    GPUPOOL_WARNING("no %s of %llu bytes: %s", place == kHost ? "pinned memory" : "device memory",
                    static_cast<unsigned long long>(bytes), answer.error.c_str());
  if (answer.granted) return CUDA_SUCCESS;
  return answer.heard ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

void ServerAccount::give(unsigned place, uint64_t bytes) {
  if (place != kHost) process_.giveMemory(place, bytes);
}

uint64_t ServerAccount::others(unsigned place) { return process_.takeMemory(place, 0).othersBytes; }

CUresult ServerAccount::resultOf(const ShareAnswer& answer) {
  if (answer.session != 0) number_ = answer.session;
  switch (answer.error) {
    case ShareAnswer::Error::none:
      return CUDA_SUCCESS;
    case ShareAnswer::Error::unknown:
      return CUDA_ERROR_INVALID_HANDLE;
    case ShareAnswer::Error::elsewhere:
      return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    case ShareAnswer::Error::otherDevice:
      return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    case ShareAnswer::Error::own:
      return CUDA_ERROR_INVALID_CONTEXT;
    case ShareAnswer::Error::tooMany:
      GPUPOOL_WARNING("nothing more can be shared: the session, or the server, has too many shared pieces");
      return CUDA_ERROR_OUT_OF_MEMORY;
    case ShareAnswer::Error::unheard:
      break;
  }
  return CUDA_ERROR_UNKNOWN;
}

CUresult ServerAccount::offer(uint64_t piece, const Part& part, int descriptor, schema::ShareToken& token) {
  const ShareAnswer answer = process_.share(
      {ShareReport::What::offer, {piece, part.place, part.bytes, part.offset, part.length}, {}, 0},
      descriptor);
  if (answer.descriptor >= 0) ::close(answer.descriptor);
  token = {{answer.key.server.high, answer.key.server.low}, {answer.key.key.high, answer.key.key.low}};
  return resultOf(answer);
}

CUresult ServerAccount::open(const schema::ShareToken& token, Opened& opened) {
  const ShareAnswer answer = process_.share({ShareReport::What::open, {}, keyOf(token), 0});
  const ShareOffer& part = answer.offer;
  opened = {answer.opening, {part.place, part.bytes, part.offset, part.length}, answer.descriptor};
  CUresult result = resultOf(answer);
  if (result == CUDA_SUCCESS && opened.descriptor < 0) {  // this process can have no more
    close(opened.opening);
    result = CUDA_ERROR_OUT_OF_MEMORY;
  }
  return result;
}

void ServerAccount::endOffer(const schema::ShareToken& token, bool awaited) {
  const ShareReport end{ShareReport::What::endOffer, {}, keyOf(token), 0};
  if (awaited)
    process_.share(end);
  else
    process_.tellShare(end);
}

void ServerAccount::inherit(unsigned place, uint64_t bytes) {
  if (place != kHost) process_.inheritMemory(place, bytes);
}

void ServerAccount::disinherit(unsigned place, uint64_t bytes) {
  if (place != kHost) process_.disinheritMemory(place, bytes);
}

void ServerAccount::endPiece(uint64_t piece, unsigned place, uint64_t bytes) {
  const ShareOffer ended{piece, place, place == kHost ? 0 : bytes, 0, 0};
  process_.tellShare({ShareReport::What::endPiece, ended, {}, piece});
}

void ServerAccount::close(uint64_t opening) {
  process_.tellShare({ShareReport::What::close, {}, {}, opening});
}

}  // namespace gpupool::server

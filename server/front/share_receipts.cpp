#include "server/front/share_receipts.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <algorithm>
#include <cstring>

#include "base/hmac.h"
#include "schema/convert.h"
#include "schema/store.capnp.h"

namespace gpupool::server {

std::vector<std::byte> ShareReceipts::write(const SharedPiece& piece) const {
  capnp::MallocMessageBuilder message;
  auto to = message.initRoot<schema::SharedPiece>();
  to.setId(piece.id);
  to.setSession(piece.session);
  to.setPiece(piece.piece);
  to.setPlace(piece.place);
  to.setBytes(piece.bytes);
  schema::write(piece.account.first, to.initLease());
  to.setDeviceEpoch(piece.account.second);
  to.setDevice(schema::data(piece.device));
  const auto words = capnp::messageToFlatArray(message);
  const auto text = std::as_bytes(std::span(words.begin(), words.size()));
  const Digest seal = hmacSha256(key_, text);
  std::vector<std::byte> receipt(seal.size() + text.size());
  std::copy(seal.begin(), seal.end(), receipt.begin());
  std::copy(text.begin(), text.end(), receipt.begin() + seal.size());
  return receipt;
}

std::optional<SharedPiece> ShareReceipts::read(std::span<const std::byte> receipt) const {
  constexpr size_t kSeal = std::tuple_size_v<Digest>;
  if (receipt.size() <= kSeal || (receipt.size() - kSeal) % sizeof(capnp::word) != 0) return std::nullopt;
  const auto text = receipt.subspan(kSeal);
  if (!equalConstantTime(receipt.first(kSeal), hmacSha256(key_, text))) return std::nullopt;
  auto words = kj::heapArray<capnp::word>(text.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), text.data(), text.size());
  capnp::FlatArrayMessageReader reader(words);
  const auto from = reader.getRoot<schema::SharedPiece>();
  return SharedPiece{from.getId(),
                     {schema::read(from.getLease()), from.getDeviceEpoch()},
                     from.getSession(),
                     from.getPiece(),
                     from.getPlace(),
                     from.getBytes(),
                     schema::bytes(from.getDevice())};
}

}  // namespace gpupool::server

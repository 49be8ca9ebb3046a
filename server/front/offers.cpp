#include "server/front/offers.h"

#include <algorithm>

#include "schema/worker.capnp.h"

namespace gpupool::server {

std::map<uint64_t, Offers::Piece>::iterator Offers::find(uint64_t session, uint64_t piece) {
  const auto known = known_.find({session, piece});
  return known == known_.end() ? pieces_.end() : pieces_.find(known->second);
}

Offers::Refusal Offers::offer(const Asker& owner, const Part& part, kj::AutoCloseFd descriptor,
                              Token& token) {
  const uint64_t session = owner.session;
  auto piece = find(session, part.piece);
  if (offersOf_[session] >= kMostOffers) return Refusal::tooMany;
  if (piece == pieces_.end()) {
    if (descriptor.get() < 0 || pieces_.size() >= mostPieces_) return Refusal::tooMany;
    const bool host = part.place == schema::HOST_MEMORY;
    if (!host && part.place >= owner.devices.size()) return Refusal::unknown;
    const std::string device = host ? "" : owner.devices[part.place];
    Piece made{owner.account, session, part, device, kj::mv(descriptor), {}, {}};
    piece = pieces_.emplace(nextPiece_++, std::move(made)).first;
    known_[{session, part.piece}] = piece->first;
  }
  token = {server_, Id::random()};
  addOffer(piece, token.key, part.offset, part.length);
  return Refusal::none;
}

void Offers::addOffer(std::map<uint64_t, Piece>::iterator piece, const Id& key, uint64_t offset,
                      uint64_t length) {
  Part offered = piece->second.whole;  // what it was said to be first
  offered.offset = offset;
  offered.length = length;
  if (!offers_.emplace(key, Offer{piece->first, offered}).second) return;
  piece->second.offers.insert(key);
  ++offersOf_[piece->second.session];
}

void Offers::addOpening(std::map<uint64_t, Piece>::iterator piece, uint64_t session, uint64_t opening,
                        const Id& lease) {
  openings_.emplace(std::pair(session, opening), piece->first);
  piece->second.openings.emplace(std::pair(session, opening), lease);
  ++openingsOf_[session];
}

SharedPiece Offers::pieceOf(const Token& token) const {
  const auto offer = offers_.find(token.key);
  if (offer == offers_.end()) return {};
  const Piece& piece = pieces_.at(offer->second.piece);
  return {offer->second.piece, piece.account,     piece.session, piece.whole.piece,
          piece.whole.place,   piece.whole.bytes, piece.device};
}

void Offers::endOffer(uint64_t session, const Token& token) {
  const auto offer = offers_.find(token.key);
  if (offer == offers_.end() || token.server != server_) return;
  Piece& piece = pieces_.at(offer->second.piece);
  if (piece.session != session) return;
  piece.offers.erase(token.key);
  offers_.erase(offer);
  --offersOf_[session];
}

std::optional<Offers::Charge> Offers::endPiece(uint64_t session, uint64_t number) {
  const auto piece = find(session, number);
  if (piece == pieces_.end()) return std::nullopt;
  return end(piece);
}

Offers::Charge Offers::end(std::map<uint64_t, Piece>::iterator at) {
  Piece& piece = at->second;
  for (const Id& key : piece.offers) offers_.erase(key);
  offersOf_[piece.session] -= piece.offers.size();
  piece.offers.clear();
  known_.erase({piece.session, piece.whole.piece});
  const uint64_t heir = piece.openings.empty() ? 0 : kHeir | at->first;
  const Charge charge{piece.account, piece.session, heir, piece.whole.place, piece.whole.bytes};
  piece.session = 0;
  piece.descriptor = nullptr;  // nobody opens it any more
  if (heir == 0) pieces_.erase(at);
  return charge;
}

Offers::Refusal Offers::open(const Asker& asker, const Token& token, const MayShare& mayShare,
                             Opened& opened) {
  if (token.server != server_) return Refusal::elsewhere;
  const auto offer = offers_.find(token.key);
  if (offer == offers_.end()) return Refusal::unknown;
  const auto at = pieces_.find(offer->second.piece);
  const Piece& piece = at->second;
  const Id& owner = piece.account.first;
  const Id& lease = asker.account.first;
  // Of a lease's two placements, as it moves, neither has memory of the other.
  if (owner == lease && piece.account != asker.account) return Refusal::elsewhere;
  if (owner != lease && !mayShare(owner, lease)) return Refusal::elsewhere;
  if (piece.session == asker.session) return Refusal::own;
  Part part = offer->second.part;
  if (!piece.device.empty()) {
    const auto seen = std::find(asker.devices.begin(), asker.devices.end(), piece.device);
    if (seen == asker.devices.end()) return Refusal::otherDevice;
    part.place = static_cast<uint32_t>(seen - asker.devices.begin());
  }
  if (openingsOf_[asker.session] >= kMostOffers) return Refusal::tooMany;
  opened = {nextOpening_++, part, piece.descriptor};
  addOpening(at, asker.session, opened.opening, lease);
  return Refusal::none;
}

std::optional<Offers::Charge> Offers::close(uint64_t session, uint64_t opening) {
  const auto found = openings_.find({session, opening});
  if (found == openings_.end()) return std::nullopt;
  const auto at = pieces_.find(found->second);
  Piece& piece = at->second;
  piece.openings.erase(found->first);
  if (piece.device.empty()) piece.former.insert(session);
  openings_.erase(found);
  --openingsOf_[session];
  if (piece.session != 0 || !piece.openings.empty()) return std::nullopt;
  const Charge charge{piece.account, kHeir | at->first, 0, piece.whole.place, piece.whole.bytes};
  pieces_.erase(at);
  return charge;
}

std::vector<Offers::Charge> Offers::leave(uint64_t session) {
  std::vector<Charge> charges;
  for (auto known = known_.lower_bound({session, 0}); known != known_.end() && known->first.first == session;
       known = known_.lower_bound({session, 0}))
    charges.push_back(end(pieces_.find(known->second)));
  for (auto at = openings_.lower_bound({session, 0}); at != openings_.end() && at->first.first == session;
       at = openings_.lower_bound({session, 0}))
    if (auto charge = close(session, at->first.second)) charges.push_back(*charge);
  for (auto& [number, piece] : pieces_) piece.former.erase(session);
  offersOf_.erase(session);
  openingsOf_.erase(session);
  return charges;
}

std::set<uint64_t> Offers::sharers(uint64_t session, uint32_t place) const {
  std::set<uint64_t> all;
  for (const auto& [number, piece] : pieces_) {
    if (piece.whole.place != place) continue;
    bool shares = piece.session == session || piece.former.contains(session);
    for (const auto& [opening, lease] : piece.openings) shares = shares || opening.first == session;
    if (!shares) continue;
    if (piece.session != 0) all.insert(piece.session);
    for (const auto& [opening, lease] : piece.openings) all.insert(opening.first);
  }
  all.erase(session);
  return all;
}

std::set<uint64_t> Offers::borrowers(const Id& lease, uint64_t deviceEpoch) const {
  std::set<uint64_t> all;
  for (const auto& [number, piece] : pieces_) {
    if (piece.account.first != lease || (deviceEpoch != 0 && piece.account.second != deviceEpoch)) continue;
    for (const auto& [opening, opener] : piece.openings)
      if (piece.lends(opener)) all.insert(opening.first);
  }
  return all;
}

std::set<Id> Offers::lenders() const {
  std::set<Id> all;
  for (const auto& [number, piece] : pieces_)
    for (const auto& [opening, opener] : piece.openings)
      if (piece.lends(opener)) all.insert(piece.account.first);
  return all;
}

// ---- of an earlier life ----

// Pieces first, then what stands on them, whatever the order in which sessions came.
std::vector<Offers::Charge> Offers::restore(std::vector<Earlier> all, const IsHere& isHere) {
  std::vector<Charge> charges;
  for (Earlier& one : all)
    for (auto& [id, piece] : one.pieces)
      if (piece.first.session == one.session && piece.first.account == one.account)
        restorePiece(piece.first, kj::mv(piece.second));
  for (const Earlier& one : all) {
    for (const Earlier::Offered& offered : one.offers) restoreOffer(one.session, offered);
    for (const auto& [opening, piece] : one.openings)
      if (auto charge = restoreOpening(one, opening, piece, isHere)) charges.push_back(*charge);
  }
  return charges;
}

void Offers::restorePiece(const SharedPiece& piece, kj::AutoCloseFd descriptor) {
  if (pieces_.size() >= mostPieces_ || piece.id >= first_ || pieces_.contains(piece.id)) return;
  if (!known_.emplace(std::pair(piece.session, piece.piece), piece.id).second) return;
  const Part whole{piece.piece, piece.place, piece.bytes, 0, piece.bytes};
  pieces_.emplace(piece.id,
                  Piece{piece.account, piece.session, whole, piece.device, kj::mv(descriptor), {}, {}, {}});
}

void Offers::restoreOffer(uint64_t session, const Earlier::Offered& offered) {
  const auto piece = find(session, offered.piece);
  if (piece == pieces_.end() || offersOf_[session] >= kMostOffers) return;
  addOffer(piece, offered.key, offered.offset, offered.length);
}

std::optional<Offers::Charge> Offers::restoreOpening(const Earlier& who, uint64_t opening,
                                                     const SharedPiece& of, const IsHere& isHere) {
  if (of.session == who.session || of.id >= first_ || opening == 0 || opening >= first_) return std::nullopt;
  if (openingsOf_[who.session] >= kMostOffers) return std::nullopt;
  std::optional<Charge> charge;
  auto piece = pieces_.find(of.id);
  if (piece == pieces_.end()) {
    if (pieces_.size() >= mostPieces_ || !isHere(of.account)) return std::nullopt;
    const Part whole{of.piece, of.place, of.bytes, 0, of.bytes};
    piece =
        pieces_.emplace(of.id, Piece{of.account, 0, whole, of.device, kj::AutoCloseFd(), {}, {}, {}}).first;
    charge = Charge{of.account, 0, kHeir | of.id, of.place, of.bytes};
  }
  addOpening(piece, who.session, opening, who.account.first);
  return charge;
}

}  // namespace gpupool::server

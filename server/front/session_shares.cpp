// SessionTable's part in what sessions share: a worker's offers and openings, and what becomes of them when a
// session ends.
#include <capnp/message.h>
#include <sys/resource.h>

#include <algorithm>

#include "base/log.h"
#include "schema/convert.h"
#include "server/front/sessions.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostShared = 4096;     // of a worker that waits for its session
constexpr size_t kMostDescriptors = 64;  // likewise, of what it offers: a thread offers one at a time

// Pieces of memory that sessions share: of the descriptors that this process may have, most are for others.
size_t mostSharedPieces() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur / 4 : 0;
}

Offers::Token read(schema::ShareKey::Reader from) {
  return {schema::read(from.getServer()), schema::read(from.getKey())};
}

void put(const Offers::Token& from, schema::ShareKey::Builder to) {
  schema::write(from.server, to.initServer());
  schema::write(from.key, to.initKey());
}

Offers::Part read(schema::ShareOffer::Reader from) {
  return {from.getPiece(), from.getPlace(), from.getBytes(), from.getOffset(), from.getLength()};
}

schema::ShareError errorOf(Offers::Refusal refusal) {
  switch (refusal) {
    case Offers::Refusal::none:
      return schema::ShareError::NONE;
    case Offers::Refusal::unknown:
      return schema::ShareError::UNKNOWN;
    case Offers::Refusal::elsewhere:
    case Offers::Refusal::otherDevice:  // ShareAnswer.otherDevice says so
      return schema::ShareError::ELSEWHERE;
    case Offers::Refusal::own:
      return schema::ShareError::OWN;
    case Offers::Refusal::tooMany:
      break;
  }
  return schema::ShareError::TOO_MANY;
}

}  // namespace

void SessionTable::share(const StoredSharing& sharing) {
  offers_ = Offers(mostSharedPieces(), sharing.server, sharing.life);
  receipts_ = ShareReceipts(sharing.seal);
  nextNumber_ = uint64_t{sharing.life} << 32 | 1;
}

void SessionTable::apply(const Offers::Charge& charge) {
  if (charge.place == schema::HOST_MEMORY) return;
  if (charge.from == 0)
    accounts_.try_emplace(charge.account, limits_(charge.account.first, charge.account.second));
  const auto account = accounts_.find(charge.account);
  if (account == accounts_.end()) return;
  if (charge.from == 0)
    account->second.take(charge.to, charge.place, charge.bytes);
  else if (charge.to != 0)
    account->second.hand(charge.from, charge.to, charge.place, charge.bytes);
  else
    account->second.give(charge.from, charge.place, charge.bytes);
  dropUnusedAccount(charge.account);
}

// What others go on with is no longer the session's, either, at the devices to which it is moving.
void SessionTable::giveAtNext(const Session& session, uint32_t place, uint64_t bytes) {
  const Session* other = next(session.number);
  if (place == schema::HOST_MEMORY || other == nullptr || other == &session) return;
  const AccountName there = accountOf(other->facts);
  const auto account = accounts_.find(there);
  if (there == accountOf(session.facts) || account == accounts_.end()) return;
  account->second.give(session.number, place, bytes);
}

Offers::Asker SessionTable::asker(const Session& session) const {
  return {accountOf(session.facts), session.number, session.facts.devices};
}

void SessionTable::hearShare(Session& session, schema::ShareReport::Reader report,
                             kj::AutoCloseFd descriptor) {
  if (report.isAgain()) return hearAgain(session, report.getAgain(), kj::mv(descriptor));
  Shared shared;
  shared.ticket = report.getTicket();
  shared.what = report.which();
  shared.descriptor = kj::mv(descriptor);
  if (report.isOffer()) shared.part = read(report.getOffer());
  if (report.isEndOffer()) shared.token = read(report.getEndOffer());
  if (report.isOpen()) shared.token = read(report.getOpen());
  if (report.isEndPiece()) shared.number = report.getEndPiece();
  if (report.isClose()) shared.number = report.getClose();
  if (session.role == Role::old || session.dropped) return;
  if (session.role == Role::serving && sharesKnown_) return serveShare(session, kj::mv(shared));
  session.shared.push_back(kj::mv(shared));
  const auto offers =
      std::ranges::count_if(session.shared, [](const Shared& one) { return one.descriptor.get() >= 0; });
  if (session.shared.size() > kMostShared || static_cast<size_t>(offers) > kMostDescriptors)
    session.worker->kill();
}

void SessionTable::serveShares(Session& session) {
  for (Shared& shared : std::exchange(session.shared, {})) serveShare(session, kj::mv(shared));
}

void SessionTable::serveShare(Session& session, Shared shared) {
  if (!accounts_.contains(accountOf(session.facts))) return;
  switch (shared.what) {
    case schema::ShareReport::END_OFFER:
      offers_.endOffer(session.number, shared.token);
      if (shared.ticket != 0) answerShare(session, kj::mv(shared));
      return;
    case schema::ShareReport::END_PIECE:
      if (const auto charge = offers_.endPiece(session.number, shared.number)) {
        if (charge->to == 0 && charge->place != schema::HOST_MEMORY) {
          giveMemory(session, charge->place, charge->bytes);
        } else {
          apply(*charge);
          giveAtNext(session, charge->place, charge->bytes);
        }
      }
      return;
    case schema::ShareReport::CLOSE:
      if (const auto charge = offers_.close(session.number, shared.number)) apply(*charge);
      return lookAtBorrowers();
    default:
      return answerShare(session, kj::mv(shared));
  }
}

void SessionTable::answerShare(Session& session, Shared shared) {
  capnp::MallocMessageBuilder message;
  auto answer = message.initRoot<schema::WorkerOrder>().initShare();
  answer.setTicket(shared.ticket);
  answer.setSession(session.number);
  auto refusal = Offers::Refusal::none;
  Offers::Opened opened;
  std::vector<std::byte> receipt;
  if (shared.what == schema::ShareReport::OFFER) {
    Offers::Token token;
    refusal = offers_.offer(asker(session), shared.part, kj::mv(shared.descriptor), token);
    if (refusal == Offers::Refusal::none) put(token, answer.initKey());
    if (refusal == Offers::Refusal::none) receipt = receipts_.write(offers_.pieceOf(token));
  } else if (shared.what == schema::ShareReport::OPEN) {
    refusal = offers_.open(asker(session), shared.token, mayShare_, opened);
    if (refusal == Offers::Refusal::none) receipt = receipts_.write(offers_.pieceOf(shared.token));
    if (refusal == Offers::Refusal::elsewhere)
      GPUPOOL_INFO(
          "session %s: was given memory or an event of another tenant or server, or of an earlier life of "
          "this one",
          session.facts.session.text().c_str());
    answer.setOtherDevice(refusal == Offers::Refusal::otherDevice);
    if (refusal == Offers::Refusal::none) {
      answer.setOpening(opened.opening);
      auto part = answer.initOffer();
      part.setPlace(opened.part.place);
      part.setBytes(opened.part.bytes);
      part.setOffset(opened.part.offset);
      part.setLength(opened.part.length);
    }
  }
  answer.setError(errorOf(refusal));
  answer.setReceipt({reinterpret_cast<const kj::byte*>(receipt.data()), receipt.size()});
  const std::span<const int> descriptors(&opened.descriptor, opened.descriptor >= 0 ? 1 : 0);
  session.worker->send(message, descriptors);  // one that takes no order any more has other troubles
}

std::string SessionTable::borrowers(const Id& lease, uint64_t deviceEpoch) const {
  const auto numbers = offers_.borrowers(lease, deviceEpoch);
  if (numbers.empty()) return "";
  const Session* first = find(*numbers.begin());
  std::string text = describe(*numbers.begin());
  if (first != nullptr) text += " of lease " + shortId(first->facts.lease);
  if (numbers.size() > 1) text += ", and " + std::to_string(numbers.size() - 1) + " more";
  return text;
}

std::string SessionTable::lentText(const Id& lease, uint64_t deviceEpoch) const {
  const std::string others = borrowers(lease, deviceEpoch);
  return others.empty() ? "" : "memory of it is in use by " + others;
}

kj::Promise<void> SessionTable::givenBack(const Id& lease) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  givenBack_.emplace(lease, kj::mv(pair.fulfiller));
  lookAtBorrowers();
  return kj::mv(pair.promise);
}

kj::Promise<void> SessionTable::takenBack(const Id& lease, kj::Duration bound, const std::string& reason) {
  return timer_.timeoutAfter(bound, givenBack(lease))
      .catch_([this, lease, reason](kj::Exception&& exception) -> kj::Promise<void> {
        if (exception.getType() != kj::Exception::Type::OVERLOADED) return kj::mv(exception);
        kj::Vector<kj::Promise<void>> ends;
        for (const uint64_t number : offers_.borrowers(lease)) ends.add(endOne(number, reason));
        return kj::joinPromises(ends.releaseAsArray()).then([this, lease] { return givenBack(lease); });
      });
}

void SessionTable::lookAtBorrowers() {
  if (givenBack_.empty()) return;
  const std::set<Id> lenders = offers_.lenders();
  for (auto waits = givenBack_.begin(); waits != givenBack_.end();) {
    if (lenders.contains(waits->first)) {
      ++waits;
      continue;
    }
    waits->second->fulfill();
    waits = givenBack_.erase(waits);
  }
}

void SessionTable::leaveShares(const Session& session) {
  auto sharers = offers_.sharers(session.number, schema::HOST_MEMORY);
  for (const Offers::Charge& charge : offers_.leave(session.number)) apply(charge);
  lookAtBorrowers();
  // Whose events it had closed in that life is not known any more (Offers::Piece::former).
  if (session.facts.readopted) sharers.merge(readopted());
  sharers.erase(session.number);
  tellGone(sharers, session.number);
}

void SessionTable::tellGone(const std::set<uint64_t>& whom, uint64_t number) {
  for (const uint64_t one : whom) {
    Session* other = find(one);
    if (other == nullptr) continue;
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setGone(number);
    other->worker->send(message);
  }
}

// ---- of an earlier life ----

std::set<uint64_t> SessionTable::readopted() const {
  std::set<uint64_t> all;
  for (const auto& session : living_)
    if (session->facts.readopted) all.insert(session->number);
  return all;
}

void SessionTable::hearAgain(Session& session, schema::SharedAgain::Reader again,
                             kj::AutoCloseFd descriptor) {
  if (session.owedShares == 0 || !session.earlier) {
    giveUp(session, KJ_EXCEPTION(FAILED, "the worker says again what it shares, and was not asked"));
    return;
  }
  Offers::Earlier& earlier = *session.earlier;
  bool right = true;
  if (again.getReceipt().size() == 0) {
    earlier.offers.push_back(
        {schema::read(again.getKey().getKey()), again.getPiece(), again.getOffset(), again.getLength()});
  } else {
    const auto piece =
        receipts_.read(std::as_bytes(std::span(again.getReceipt().begin(), again.getReceipt().size())));
    right = piece.has_value();
    if (right && again.getOpening() != 0) {
      right = earlier.openings.try_emplace(again.getOpening(), *piece).second;
    } else if (right) {
      right = piece->session == session.number && piece->account == accountOf(session.facts) &&
              earlier.pieces.try_emplace(piece->id, *piece, kj::mv(descriptor)).second;
      if (right && ++piecesAgain_ > offers_.mostPieces()) giveUpLargest();
    }
  }
  if (!right) {
    giveUp(session, KJ_EXCEPTION(FAILED, "the worker says that it shares what it does not"));
    return;
  }
  --session.owedShares;
  lookAtOwedShares();
}

// Of all that share, one has to go: what there is room for was so in that life, too.
void SessionTable::giveUpLargest() {
  const auto pieces = [](const kj::Own<Session>& session) {
    return session->earlier ? session->earlier->pieces.size() : 0;
  };
  const auto largest = std::ranges::max_element(living_, {}, pieces);
  piecesAgain_ -= pieces(*largest);
  (*largest)->earlier.reset();
  giveUp(**largest, KJ_EXCEPTION(FAILED, "the worker shares more than this server has room for"));
}

bool SessionTable::owesShares() const {
  return std::any_of(living_.begin(), living_.end(),
                     [](const auto& session) { return session->owedShares != 0; });
}

void SessionTable::lookAtOwedShares() {
  if (sharesTold_.get() != nullptr && !owesShares()) sharesTold_->fulfill();
}

kj::Promise<void> SessionTable::sharesTold(kj::Duration bound) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  sharesTold_ = kj::mv(pair.fulfiller);
  lookAtOwedShares();
  return timer_.timeoutAfter(bound, kj::mv(pair.promise));
}

// What one that is killed had taken counts until it is gone.
kj::Promise<void> SessionTable::restoreShares(kj::Duration bound) {
  return sharesTold(bound)
      .catch_([this](kj::Exception&&) {
        for (auto& session : living_)
          if (session->owedShares != 0)
            giveUp(*session, KJ_EXCEPTION(FAILED, "the worker does not say what it shares"));
        return sharesTold(bounds_.stop).catch_([](kj::Exception&&) {});  // a driver may hold it
      })
      .then([this] { settleShares(); });
}

void SessionTable::settleShares() {
  sharesTold_ = nullptr;
  sharesKnown_ = true;
  std::vector<Offers::Earlier> all;
  for (auto& session : living_) {
    if (session->earlier && session->owedShares == 0) all.push_back(std::move(*session->earlier));
    session->earlier.reset();
    session->owedShares = 0;
  }
  const auto isHere = [this](const AccountName& account) {
    return !limits_(account.first, account.second).empty();
  };
  for (const Offers::Charge& charge : offers_.restore(std::move(all), isHere)) apply(charge);
  if (offers_.pieces() != 0)
    GPUPOOL_INFO("%zu pieces of memory of this server's earlier life are shared still", offers_.pieces());
  for (const uint64_t number : readopted())
    if (Session* session = find(number)) {
      for (const Asked& asked : std::exchange(session->asked, {})) serveMemory(*session, asked);
      serveShares(*session);
    }
}

void SessionTable::endedEarlier(uint64_t number) { tellGone(readopted(), number); }

}  // namespace gpupool::server

// SessionTable's part in what sessions share: a worker's offers and openings, and what becomes of them when a
// session ends.
#include <capnp/message.h>

#include "base/log.h"
#include "schema/convert.h"
#include "server/front/sessions.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostShared = 4096;  // of a worker that waits for its session

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

void SessionTable::apply(const Offers::Charge& charge) {
  const auto account = accounts_.find(charge.account);
  if (account == accounts_.end() || charge.place == schema::HOST_MEMORY) return;
  if (charge.to != 0)
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
  if (session.role == Role::serving) return serveShare(session, kj::mv(shared));
  session.shared.push_back(kj::mv(shared));
  if (session.shared.size() > kMostShared) session.worker->kill();
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
  if (shared.what == schema::ShareReport::OFFER) {
    Offers::Token token;
    refusal = offers_.offer(asker(session), shared.part, kj::mv(shared.descriptor), token);
    if (refusal == Offers::Refusal::none) put(token, answer.initKey());
  } else if (shared.what == schema::ShareReport::OPEN) {
    refusal = offers_.open(asker(session), shared.token, mayShare_, opened);
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
  const auto sharers = offers_.sharers(session.number, schema::HOST_MEMORY);
  for (const Offers::Charge& charge : offers_.leave(session.number)) apply(charge);
  lookAtBorrowers();
  for (const uint64_t number : sharers) {
    Session* other = find(number);
    if (other == nullptr) continue;
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setGone(session.number);
    other->worker->send(message);
  }
}

}  // namespace gpupool::server

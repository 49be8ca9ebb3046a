// Memory and events that sessions of a lease share.
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using MemoryOffer = GPUPOOL_ROW(sessionMemoryOffer);
using OfferEnd = GPUPOOL_ROW(sessionOfferEnd);
using MemoryOpen = GPUPOOL_ROW(sessionMemoryOpen);
using EventOffer = GPUPOOL_ROW(sessionEventOffer);
using EventOpen = GPUPOOL_ROW(sessionEventOpen);
using SharedRecord = GPUPOOL_ROW(sessionSharedRecord);
using SharedWait = GPUPOOL_ROW(sessionSharedWait);
using SharedQuery = GPUPOOL_ROW(sessionSharedQuery);

void offerMemory(Session& session, Call& call) {
  Served<MemoryOffer> served(session, call);
  if (served.open())
    served.close(session.space().offer(served.get<"name">().value(), served.get<"address">().value(),
                                       served.get<"bytes">().value(), served.get<"token">().plain()));
}

void endOffer(Session& session, Call& call) {
  Served<OfferEnd> served(session, call);
  if (!served.open()) return;
  session.account().endOffer(served.get<"token">().value(), true);
  served.close(CUDA_SUCCESS);
}

void openMemory(Session& session, Call& call) {
  Served<MemoryOpen> served(session, call);
  if (!served.open()) return;
  Space::OpenedPiece opened;
  const CUresult status =
      session.space().open(served.get<"token">().value(), served.get<"name">().value(), opened);
  served.get<"device">().plain() = opened.device;
  served.get<"bytes">().plain() = opened.bytes;
  served.get<"offset">().plain() = opened.offset;
  served.get<"length">().plain() = opened.length;
  served.close(status);
}

void offerEvent(Session& session, Call& call) {
  Served<EventOffer> served(session, call);
  if (!served.open()) return;
  auto& event = served.get<"event">();
  served.close(session.sharedEvents().offer(event.id(), event.value(), served.get<"token">().plain()));
}

// The driver's event only stands for it: nothing is ever recorded in it but inside of captures.
void openEvent(Session& session, Call& call) {
  Served<EventOpen> served(session, call);
  if (!served.open()) return;
  auto& event = served.get<"event">();
  CUresult status = session.driver().cuEventCreate(event.pass(), CU_EVENT_DISABLE_TIMING);
  if (status == CUDA_SUCCESS) {
    status = session.sharedEvents().open(event.id(), served.get<"token">().value());
    if (status != CUDA_SUCCESS) session.driver().cuEventDestroy_v2(*event.pass());
  }
  served.close(status);
}

void recordShared(Session& session, Call& call) {
  Served<SharedRecord> served(session, call);
  if (served.open())
    served.close(session.sharedEvents().record(served.get<"event">().id(), served.get<"stream">().value()));
}

void waitForShared(Session& session, Call& call) {
  Served<SharedWait> served(session, call);
  if (served.open())
    served.close(session.sharedEvents().wait(served.get<"event">().id(), served.get<"stream">().value()));
}

void queryShared(Session& session, Call& call) {
  Served<SharedQuery> served(session, call);
  if (served.open()) served.close(session.sharedEvents().query(served.get<"event">().id()));
}

}  // namespace

void addShareHandlers(HandlerTable& table) {
  table.add<MemoryOffer>(&offerMemory);
  table.add<OfferEnd>(&endOffer);
  table.add<MemoryOpen>(&openMemory);
  table.add<EventOffer>(&offerEvent);
  table.add<EventOpen>(&openEvent);
  table.add<SharedRecord>(&recordShared);
  table.add<SharedWait>(&waitForShared);
  table.add<SharedQuery>(&queryShared);
}

}  // namespace gpupool::server

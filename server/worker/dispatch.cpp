#include "server/worker/dispatch.h"

#include <cstdio>
#include <cstdlib>

#include "server/worker/serve.h"

namespace gpupool::server {

void HandlerTable::insert(uint32_t id, const Handler& handler) {
  size_t at = id % kPlaces;
  while (places_[at].first != 0 && places_[at].first != id) at = (at + 1) % kPlaces;
  if (places_[at].first == 0 && ++used_ > kPlaces / 2) std::abort();  // more rows: make it larger
  places_[at] = {id, handler};
}

const Handler* HandlerTable::find(uint32_t id) const {
  for (size_t at = id % kPlaces; places_[at].first != 0; at = (at + 1) % kPlaces)
    if (places_[at].first == id) return &places_[at].second;
  return nullptr;
}

namespace {

template <class R, auto Member>
void addRow(HandlerTable& table) {
  if constexpr (R::worker == schema::Worker::Generated) table.put<R>(&serveDriver<R, Member>);
}

// A Checked row without a handler: found by whoever starts a worker first.
template <class R>
void mustServe(const HandlerTable& table) {
  if (!R::travels || table.find(R::id) != nullptr) return;
  std::fprintf(stderr, "the row of %s says Checked, and server/worker/calls/ has no handler\n", R::name.text);
  std::abort();
}

HandlerTable build() {
  HandlerTable table;
#define CALL(function, ...) addRow<GPUPOOL_ROW(function), &Driver::function>(table);
#define SESSION_CALL(function, ...)
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
  addArrayHandlers(table);
  addContextHandlers(table);
  addMemoryHandlers(table);
  addCopyHandlers(table);
  addLinkHandlers(table);
  addModuleHandlers(table);
  addTextureHandlers(table);
  addShareHandlers(table);
  addStreamHandlers(table);
  addLaunchHandlers(table);
  addGraphHandlers(table);
  addGraphTextHandlers(table);
  addGreenHandlers(table);
#define CALL(function, ...) mustServe<GPUPOOL_ROW(function)>(table);
#define SESSION_CALL(function, ...) mustServe<GPUPOOL_ROW(function)>(table);
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
  return table;
}

}  // namespace

const Handler* findHandler(uint32_t id) {
  static const HandlerTable* table = new HandlerTable(build());
  return table->find(id);
}

}  // namespace gpupool::server

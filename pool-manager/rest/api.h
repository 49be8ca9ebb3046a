#pragma once
// The REST interface: requests by the table of routes.h. One thread.

#include "pool-manager/rest/http_front.h"
#include "pool-manager/rest/routes.h"
#include "pool-manager/rest/web.h"

namespace gpupool::pool::rest {

class Api final : public Answerer {
 public:
  // Both outlive it.
  Api(kj::Timer& timer, Service& service)
      : events_(timer, service), context_{service, timer, events_, orders_} {}

  bool open(const Request& request) override { return isOfWebPage(request) || isOpen(request); }
  kj::Promise<Answer> answer(Request request) override {
    if (isOfWebPage(request)) return webFile(request);
    const Route& route = routeOf(request);
    if (!route.open) demand(request.who, route.needs);
    return route.handler(context_, request).then([&route](Answer&& answer) {
      answer.contentType = route.contentType;
      return kj::mv(answer);
    });
  }

 private:
  Events events_;
  Orders orders_;
  Context context_;
};

}  // namespace gpupool::pool::rest

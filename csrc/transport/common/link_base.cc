#include "transport/common/link_base.h"

#include <utility>

namespace kvxfer {

// Besides the parts, the gate holds the link being open and the link not being started.
LinkBase::LinkBase(std::shared_ptr<EventLoop> control, uint64_t parts)
    : control_(std::move(control)), gate_(parts + 2) {}

void LinkBase::start(LinkSink& sink) {
  sink_ = &sink;
  begin();
  leave();
}

void LinkBase::fail(const std::string& reason) {
  if (!gate_.close()) return;
  reason_ = reason;
  shut();
  leave();
}

void LinkBase::leave() {
  if (!gate_.leave()) return;
  control_->post([self = shared_from_this()] { self->sink_->on_closed(*self, self->reason_); });
}

}  // namespace kvxfer

#include "supervisor/states/hang_watch.h"

#include <algorithm>

#include "supervisor/base/deadline.h"

namespace bulkhead::supervisor {

void HangWatch::serves(Time now, bool busy, const std::optional<Reading>& page) {
    busy_ = busy;
    page_ = page;
    moved_at_ = now;
    look_at_ = now + look_interval();
    if (budgets_.watchdog > Duration::zero() && !watchdog_at_) watchdog_at_ = now + budgets_.watchdog;
}

bool HangWatch::ask(Time now) {
    if (asked_at_) {
        wanted_again_ = true;
        return false;
    }
    asked_at_ = now;
    return true;
}

std::optional<HangWatch::Time> HangWatch::due() const {
    std::optional<Time> first = watchdog_at_;
    const auto also = [&first](Time other) { first = first ? std::min(*first, other) : other; };
    if (asked_at_) also(*asked_at_ + budgets_.answer);
    if (busy_) also(look_at_);
    if (busy_ && page_ && page_->running_since) also(still_since() + budgets_.step);
    return first;
}

HangWatch::Verdict HangWatch::look(Time now, const std::optional<Reading>& page) {
    if (const auto at = due(); at && had_stopped(*at, now)) {
        restart(now);
        return Verdict::nothing;
    }
    if (asked_at_ && now - *asked_at_ >= budgets_.answer) return Verdict::unanswered;
    const bool moved = page.has_value() && page != page_;
    page_ = page;
    if (moved) moved_at_ = now;
    bool ask = false;
    if (busy_) {
        if (page && page->running_since && now - still_since() >= budgets_.step) return Verdict::no_step;
        if (now >= look_at_) {
            look_at_ = now + look_interval();
            ask = !moved;
        }
    }
    if (watchdog_at_ && now >= *watchdog_at_) {
        watchdog_at_ = now + budgets_.watchdog;
        ask = true;
    }
    return ask ? Verdict::ask : Verdict::nothing;
}

HangWatch::Duration HangWatch::look_interval() const {
    return std::max<Duration>(limits::look_interval_min, budgets_.step / 4);
}

/// Counts no time before the current request began.
HangWatch::Time HangWatch::still_since() const {
    return page_ && page_->running_since ? std::max(moved_at_, *page_->running_since) : moved_at_;
}

void HangWatch::restart(Time now) {
    moved_at_ = now;
    look_at_ = now + look_interval();
    if (asked_at_) asked_at_ = now;
    if (watchdog_at_) watchdog_at_ = now + budgets_.watchdog;
}

}  // namespace bulkhead::supervisor

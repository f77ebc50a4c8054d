#include "worker/torch/cerr_tap.h"

#include <iostream>

#include "worker/model/load_limits.h"

namespace bulkhead::worker {

CerrTap& CerrTap::instance() {
    static CerrTap& tap = *new CerrTap;
    return tap;
}

CerrTap::CerrTap() : target_{std::cerr.rdbuf()} { std::cerr.rdbuf(this); }

void CerrTap::clear() {
    const std::lock_guard lock{mutex_};
    heard_.clear();
}

std::string CerrTap::text() const {
    const std::lock_guard lock{mutex_};
    return heard_;
}

std::streamsize CerrTap::xsputn(const char* text, std::streamsize count) {
    const std::lock_guard lock{mutex_};
    heard_.append(text, static_cast<std::size_t>(count));
    if (heard_.size() > 2 * limits::heard_bytes_max) heard_.erase(0, heard_.size() - limits::heard_bytes_max);
    return target_->sputn(text, count);
}

CerrTap::int_type CerrTap::overflow(int_type character) {
    if (traits_type::eq_int_type(character, traits_type::eof())) return traits_type::not_eof(character);
    const char one = traits_type::to_char_type(character);
    return xsputn(&one, 1) == 1 ? character : traits_type::eof();
}

int CerrTap::sync() {
    const std::lock_guard lock{mutex_};
    return target_->pubsync();
}

}  // namespace bulkhead::worker

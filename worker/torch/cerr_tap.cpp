#include "worker/torch/cerr_tap.h"

#include <iostream>
#include <mutex>
#include <streambuf>

#include "worker/model/load_limits.h"

namespace bulkhead::worker {

class CerrTap::Tee final : public std::streambuf {
public:
    explicit Tee(std::streambuf* target) : target_{target} {}

    void clear() {
        const std::lock_guard lock{mutex_};
        heard_.clear();
    }
    std::string text() const {
        const std::lock_guard lock{mutex_};
        return heard_;
    }

private:
    std::streamsize xsputn(const char* text, std::streamsize count) override {
        const std::lock_guard lock{mutex_};
        heard_.append(text, static_cast<std::size_t>(count));
        if (heard_.size() > 2 * limits::heard_bytes_max) heard_.erase(0, heard_.size() - limits::heard_bytes_max);
        return target_->sputn(text, count);
    }
    int_type overflow(int_type character) override {
        if (traits_type::eq_int_type(character, traits_type::eof())) return traits_type::not_eof(character);
        const char one = traits_type::to_char_type(character);
        return xsputn(&one, 1) == 1 ? character : traits_type::eof();
    }
    int sync() override {
        const std::lock_guard lock{mutex_};
        return target_->pubsync();
    }

    std::streambuf* target_;
    mutable std::mutex mutex_;
    std::string heard_;
};

CerrTap& CerrTap::instance() {
    static CerrTap tap;
    return tap;
}

CerrTap::CerrTap() : tee_{new Tee{std::cerr.rdbuf()}} { std::cerr.rdbuf(tee_); }

void CerrTap::clear() { tee_->clear(); }

std::string CerrTap::text() const { return tee_->text(); }

}  // namespace bulkhead::worker

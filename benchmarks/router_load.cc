// Load for benchmarks/router.py: gRPC's own C++ client, so that the ends are not what is measured.
//
//     router_load ADDRESS load|idle|burst CALLS CHANNELS SECONDS PACE STREAM TOKENS [PID...]
//
// load: so many calls at all times, for so many seconds after a warm-up; idle: calls that are open
// and silent; burst: all calls at once, each of them once. Prints one JSON object. What the
// processes PID have used of processor time and memory is read at both ends of the measurement.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "inference.grpc.pb.h"

namespace {

using Clock = std::chrono::steady_clock;
using mii::v1::GenerateRequest;
using mii::v1::GenerateResponse;
using mii::v1::Inference;

constexpr int kFirstId = 10000;  // see router_worker.py
constexpr double kWarmUpSeconds = 1.0;

double Now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

struct Usage {
  double cpu_seconds = 0;
  double resident_bytes = 0;
};

Usage UsageOf(const std::string& pid) {
  Usage usage;
  std::ifstream stat("/proc/" + pid + "/stat");
  std::string line;
  std::getline(stat, line);
  std::istringstream fields(line.substr(line.rfind(')') + 2));
  std::string field;
  for (int index = 3; fields >> field; ++index) {
    if (index == 14 || index == 15) usage.cpu_seconds += std::stod(field) / sysconf(_SC_CLK_TCK);
    if (index == 24) usage.resident_bytes = std::stod(field) * sysconf(_SC_PAGESIZE);
  }
  return usage;
}

struct Counts {
  long tokens = 0, messages = 0, ended = 0, failed = 0, wrong = 0;
};

class Call;

class Load {
 public:
  std::vector<std::unique_ptr<Inference::Stub>> stubs;
  GenerateRequest request;
  bool again = false;         // a call that has ended is begun anew
  std::atomic<bool> measuring{false};

  void Begin(int index);
  void Ended(Call* call, const grpc::Status& status);
  void Accepted() { ++accepted; }
  void Waited(double gap) {
    if (!measuring) return;
    std::lock_guard<std::mutex> lock(mutex);
    gaps.push_back(gap);
  }
  void WaitUntil(const std::function<bool()>& condition) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!condition()) changed.wait_for(lock, std::chrono::milliseconds(5));
  }

  std::atomic<long> open{0}, accepted{0};
  std::atomic<long> tokens{0}, messages{0}, ended{0}, failed{0}, wrong{0};
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::vector<double> gaps, first, refused_after;
  std::string error;
};

class Call final : public grpc::ClientReadReactor<GenerateResponse> {
 public:
  Call(Load* load, int index) : load_(load), index_(index), began_(Now()) {
    load->stubs[index % load->stubs.size()]->async()->Generate(&context_, &load->request, this);
    StartRead(&response_);
    StartCall();
  }

  void OnReadInitialMetadataDone(bool ok) override {
    if (ok) load_->Accepted();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    double now = Now();
    long tokens = 0;
    for (const auto& delta : response_.deltas()) {
      for (int id : delta.token_ids()) {
        if (id != next_++) ++load_->wrong;
        ++tokens;
      }
    }
    load_->tokens += tokens;
    ++load_->messages;
    if (last_ == 0) {
      first_ = now - began_;
    } else {
      load_->Waited(now - last_);
    }
    last_ = now;
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    after_ = Now() - began_;
    load_->Ended(this, status);
    delete this;
  }

  int index() const { return index_; }
  double first() const { return first_; }
  double after() const { return after_; }

 private:
  Load* load_;
  int index_;
  double began_, last_ = 0, first_ = 0, after_ = 0;
  int next_ = kFirstId;
  grpc::ClientContext context_;
  GenerateResponse response_;
};

void Load::Begin(int index) {
  ++open;
  new Call(this, index);
}

void Load::Ended(Call* call, const grpc::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (status.ok()) {
      ++ended;
    } else {
      ++failed;
      refused_after.push_back(call->after());
      error = status.error_message();
    }
    if (measuring && call->first() > 0) first.push_back(call->first());
  }
  if (again) Begin(call->index());
  --open;
  changed.notify_all();
}

std::string Quantiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  auto at = [&](double part) {
    if (values.empty()) return 0.0;
    return 1e3 * values[std::min(values.size() - 1, static_cast<size_t>(part * values.size()))];
  };
  char text[160];
  std::snprintf(text, sizeof text, "{\"count\": %zu, \"p50\": %.4f, \"p99\": %.4f, \"max\": %.4f}",
                values.size(), at(0.5), at(0.99), at(1.0));
  return text;
}

void Pause(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::string Escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c >= ' ') out += c;
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 9) return 2;
  std::string address = argv[1], mode = argv[2];
  int calls = std::atoi(argv[3]), channels = std::atoi(argv[4]);
  double seconds = std::atof(argv[5]);
  std::vector<std::string> pids(argv + 9, argv + argc);
  auto* load = new Load;  // outlives main: calls may still be ending
  for (int index = 0; index < channels; ++index) {
    grpc::ChannelArguments arguments;
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    auto channel =
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(5));
    load->stubs.push_back(Inference::NewStub(channel));
  }
  load->request.add_prompts()->mutable_token_ids()->add_ids(std::atoi(argv[6]));
  for (int extra = 0; extra < 15; ++extra)
    load->request.mutable_prompts(0)->mutable_token_ids()->add_ids(1000 + extra);
  load->request.set_stream(std::atoi(argv[7]) != 0);
  load->request.mutable_sampling()->set_max_new_tokens(std::atoi(argv[8]));
  load->request.mutable_sampling()->set_seed(1);
  load->request.mutable_sampling()->set_ignore_eos(true);

  auto usage = [&] {
    std::vector<Usage> all;
    for (const auto& pid : pids) all.push_back(UsageOf(pid));
    return all;
  };
  std::vector<Usage> before, after;
  Counts from, to;
  auto counts = [&](Counts* into) {
    *into = {load->tokens, load->messages, load->ended, load->failed, load->wrong};
  };
  double began = 0, over = 0;
  if (mode == "load") {
    load->again = true;
    for (int index = 0; index < calls; ++index) load->Begin(index);
    Pause(kWarmUpSeconds);
    load->measuring = true;
    before = usage(), counts(&from), began = Now();
    Pause(seconds);
    after = usage(), counts(&to), over = Now();
  } else {
    before = usage(), counts(&from), began = Now();
    load->measuring = true;
    for (int index = 0; index < calls; ++index) load->Begin(index);
    if (mode == "idle") {
      load->WaitUntil([&] { return load->accepted + load->failed >= calls || Now() - began > 30; });
      Pause(seconds);
    } else {
      load->WaitUntil([&] { return load->open == 0 || Now() - began > 120; });
    }
    after = usage(), counts(&to), over = Now();
  }
  std::string processes;
  for (size_t index = 0; index < pids.size(); ++index) {
    char text[160];
    std::snprintf(text, sizeof text, "%s{\"cpu_seconds\": %.6f, \"grown_bytes\": %.0f}",
                  index ? ", " : "", after[index].cpu_seconds - before[index].cpu_seconds,
                  after[index].resident_bytes - before[index].resident_bytes);
    processes += text;
  }
  std::unique_lock<std::mutex> lock(load->mutex);
  std::printf(
      "{\"seconds\": %.6f, \"tokens\": %ld, \"messages\": %ld, \"calls\": %ld, \"failed\": %ld, "
      "\"wrong\": %ld, \"accepted\": %ld, \"unfinished\": %ld, \"gaps_ms\": %s, \"first_ms\": %s, "
      "\"refused_ms\": %s, \"processes\": [%s], \"error\": \"%s\"}\n",
      over - began, to.tokens - from.tokens, to.messages - from.messages, to.ended - from.ended,
      to.failed, to.wrong, load->accepted.load(), load->open.load(),
      Quantiles(load->gaps).c_str(), Quantiles(load->first).c_str(),
      Quantiles(load->refused_after).c_str(), processes.c_str(), Escaped(load->error).c_str());
  std::fflush(stdout);
  std::_Exit(0);  // closes all connections, which cancels what is open
}

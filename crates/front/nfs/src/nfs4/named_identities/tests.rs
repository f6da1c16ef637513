use super::*;
use std::sync::mpsc::{self, Receiver, Sender};

/// Identities of the domain `x`, the questions that arrive, and the answers that a test gives.
struct Gated {
    names: NamedIdentities,
    asked: Receiver<NameQuestion>,
    answer: Sender<Result<Option<NameResult>, String>>,
}

impl Gated {
    fn new() -> Self {
        let (ask, asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let (ask, answers) = (Mutex::new(ask), Mutex::new(answers));
        let service = move |question: &NameQuestion| {
            let _ = poison::lock(&ask).send(question.clone());
            poison::lock(&answers)
                .recv()
                .unwrap_or_else(|_| Err("the test has ended".into()))
        };
        Self {
            names: NamedIdentities::new("x", Box::new(service)).unwrap(),
            asked,
            answer,
        }
    }

    /// Gives the answer to a question that runs, and waits until it is stored.
    fn answer(&self, question: &NameQuestion, result: Result<Option<NameResult>, String>) {
        assert_eq!(self.asked.recv().unwrap(), *question);
        self.answer.send(result).unwrap();
        let is_queued = || poison::lock(&self.names.0.answers).entries[question].is_queued;
        while is_queued() {
            std::thread::yield_now();
        }
    }
}

fn name_of(uid: u32) -> NameQuestion {
    NameQuestion::NameOf(NameList::Users, uid)
}

#[test]
fn first_question_waits_without_a_thread() {
    let gated = Gated::new();
    assert_eq!(gated.names.user_name(7), NameAnswer::Pending);
    assert_eq!(gated.names.user_name(7), NameAnswer::Pending);
    gated.answer(&name_of(7), Ok(Some(NameResult::Name("anna".into()))));
    assert_eq!(gated.names.user_name(7), NameAnswer::Known("anna@x".into()));
    assert_eq!(gated.asked.try_iter().count(), 0, "asked once");
    assert_eq!(gated.names.group_id("staff@X"), NameAnswer::Pending);
    let question = NameQuestion::IdOf(NameList::Groups, "staff".into());
    gated.answer(&question, Ok(Some(NameResult::Id(50))));
    assert_eq!(gated.names.group_id("staff@x"), NameAnswer::Known(50));
}

#[test]
fn unknown_names_and_other_domains_have_no_number() {
    let gated = Gated::new();
    for name in ["anna", "anna@y", "@x", "anna@", "an\0na@x"] {
        assert_eq!(gated.names.user_id(name), NameAnswer::Unknown, "{name}");
    }
    assert_eq!(gated.names.user_id("anna@x"), NameAnswer::Pending);
    let question = NameQuestion::IdOf(NameList::Users, "anna".into());
    gated.answer(&question, Ok(None));
    assert_eq!(gated.names.user_id("anna@x"), NameAnswer::Unknown);
}

#[test]
fn stalled_service_stops_the_wait_of_clients() {
    let gated = Gated::new();
    let start = Instant::now();
    let ask = |after| gated.names.ask(name_of(7), start + after);
    assert!(matches!(ask(OWNER_LOOKUP_WAIT / 2), NameAnswer::Pending));
    assert!(matches!(ask(OWNER_LOOKUP_WAIT * 2), NameAnswer::Unknown));
    gated.answer(&name_of(7), Err("down".into()));
    assert_eq!(gated.names.user_name(7), NameAnswer::Unknown);
}

#[test]
fn old_answer_serves_while_lookups_fail() {
    let gated = Gated::new();
    assert_eq!(gated.names.user_name(7), NameAnswer::Pending);
    gated.answer(&name_of(7), Ok(Some(NameResult::Name("anna".into()))));
    let later = Instant::now() + OWNER_ANSWER_LIMIT * 2;
    let is_known = |at| matches!(gated.names.ask(name_of(7), at), NameAnswer::Known(_));
    assert!(is_known(later));
    gated.answer(&name_of(7), Err("down".into()));
    assert!(is_known(later), "a failure drops no answer");
    gated.answer(&name_of(7), Err("down".into()));
    assert!(!is_known(later + OWNER_STALE_LIMIT));
}

#[test]
fn questions_beyond_the_bounds_are_not_kept() {
    let gated = Gated::new();
    for uid in 0..OWNER_LOOKUPS_QUEUED_MAX as u32 {
        assert_eq!(gated.names.user_name(uid), NameAnswer::Pending);
    }
    // The threads have taken some of them from the queue.
    let beyond = (0..2 * OWNER_LOOKUPS_MAX as u32).map(|uid| u32::MAX / 2 + uid);
    let answers: Vec<_> = beyond.map(|uid| gated.names.user_name(uid)).collect();
    assert_eq!(
        answers.last(),
        Some(&NameAnswer::Unknown),
        "no lookup will answer it"
    );
    let answers = poison::lock(&gated.names.0.answers);
    assert_eq!(answers.queue.len(), OWNER_LOOKUPS_QUEUED_MAX);
    assert!(answers.entries.len() <= OWNER_LOOKUPS_QUEUED_MAX + OWNER_LOOKUPS_MAX);
    assert!(answers.threads <= OWNER_LOOKUPS_MAX);
}

#[test]
fn domains_are_checked() {
    assert_eq!(check_domain("example.org"), Ok(()));
    let long = "a".repeat(DOMAIN_BYTES_MAX + 1);
    for domain in ["", "a b", "a@b", long.as_str()] {
        assert!(check_domain(domain).is_err(), "{domain}");
    }
}

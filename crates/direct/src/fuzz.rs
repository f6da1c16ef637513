//! Fuzz targets of what guests and mounts say, see RFD 004.

use crate::wire::{Answer, Hidden, Question, decode_parts, encode_parts};
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, COPIES_MAX, SliceId};
use pagemesh_fuzz::Target;
use pagemesh_volume::guests::{Picture, ROWS, Seat};
use std::mem::discriminant;
use uuid::Uuid;

fn target(name: &'static str) -> Target {
    Target::new(name, env!("CARGO_MANIFEST_DIR")).cases(10_000)
}

#[test]
fn fuzz_direct_question() {
    let questions = [
        Question::Join,
        Question::Look,
        Question::Board(7),
        Question::Call,
        Question::Leave,
        Question::Grow(3),
        Question::Write(3),
    ];
    target("direct_question")
        .seeds(questions.map(|question| question.encode().to_vec()))
        .bytes_max(64)
        .run(|bytes| {
            let question = Question::decode(bytes).ok()?;
            assert_eq!(question.encode()[..], *bytes);
            Some(discriminant(&question))
        });
}

#[test]
fn fuzz_direct_parts() {
    let parts: [(u64, &[u8]); 2] = [(8192, &[1; 40]), (100, &[2; 9])];
    target("direct_parts")
        .seeds([encode_parts(&parts), encode_parts(&[])])
        .bytes_max(512)
        .run(|bytes| {
            let parts = decode_parts(&Bytes::copy_from_slice(bytes)).ok()?;
            let again: Vec<(u64, &[u8])> =
                parts.iter().map(|(at, data)| (*at, &data[..])).collect();
            assert_eq!(encode_parts(&again), bytes);
            Some(parts.len())
        });
}

#[test]
fn fuzz_direct_answer() {
    let seat = |number| Seat {
        brick: BrickId(Uuid::from_u128(number)),
        slice: SliceId(Uuid::from_u128(number + 9)),
        socket: format!("/run/brick-{number}.sock").into(),
    };
    let picture = Picture {
        generation: 3,
        epoch: Epoch(7),
        seats: vec![seat(1), seat(2)],
    };
    let answers = [
        Answer::Joined(3, Some(picture)),
        Answer::Joined(0, None),
        Answer::Yes,
        Answer::No,
        Answer::Hidden(Hidden::Full),
        Answer::Failed(5),
    ];
    target("direct_answer")
        .seeds(answers.map(|answer| answer.encode()))
        .bytes_max(512)
        .run(|bytes| {
            let answer = Answer::decode(bytes).ok()?;
            let seats = match &answer {
                Answer::Joined(row, picture) => {
                    assert!((*row as usize) < ROWS);
                    picture.as_ref().map_or(0, |picture| picture.seats.len())
                }
                Answer::Yes | Answer::No | Answer::Hidden(_) | Answer::Failed(_) => 0,
            };
            assert!(seats <= COPIES_MAX);
            assert_eq!(Answer::decode(&answer.encode()).ok(), Some(answer.clone()));
            Some((discriminant(&answer), seats))
        });
}
